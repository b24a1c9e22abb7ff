"""How a phase's sharing follows from the sharing of the phase before. Pure."""

from collections.abc import Sequence


def sources(before: Sequence[int | None], after: Sequence[int | None], what: str = "block") -> dict[int, int]:
    """Return the new number -> the old number that the same layers used. Entry l of `before` and `after` is the number
    used by layer l; None: layer l uses nothing of the kind.

    Raises ValueError if the layers of one new number used several old numbers: then the new sharing does not refine the
    old sharing.
    """
    found: dict[int, int] = {}
    for layer, (old, new) in enumerate(zip(before, after, strict=True)):
        if old is None or new is None:
            continue
        if found.setdefault(new, old) != old:
            raise ValueError(
                f"layer {layer} shares new {what} {new} with a layer of old {what} {found[new]}, but used old {what}"
                f" {old}; a phase's sharing must refine that of the phase before"
            )
    return found
