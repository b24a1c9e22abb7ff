"""Documents of a window, read as a person would."""

Pair = tuple[int, int | None]
"""An input token and its target; None: it has none."""


def cut(row: list[int], end: int) -> list[list[Pair]]:
    """The parts of documents in a window of T + 1 tokens: it is cut behind each end, and each part predicts itself,
    shifted by one."""
    parts: list[list[int]] = [[]]
    for token in row:
        parts[-1].append(token)
        if token == end:
            parts.append([])
    shifted = [[*zip(part, [*part[1:], None], strict=True)] for part in parts if part]
    # The last token of a window is a target alone.
    shifted[-1].pop()
    return [part for part in shifted if part]
