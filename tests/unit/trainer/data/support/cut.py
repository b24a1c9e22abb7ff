"""Documents of a window, cut in the most literal way, as a reference."""

Pair = tuple[int, int | None]
"""An input token and its target; None: the token has no target."""


def cut(row: list[int], end: int) -> list[list[Pair]]:
    """Return the parts of documents in a window of T + 1 tokens: the window is cut after each end, and each part
    predicts itself, shifted by one."""
    parts: list[list[int]] = [[]]
    for token in row:
        parts[-1].append(token)
        if token == end:
            parts.append([])
    shifted = [[*zip(part, [*part[1:], None], strict=True)] for part in parts if part]
    # The last token of a window is a target alone.
    shifted[-1].pop()
    return [part for part in shifted if part]
