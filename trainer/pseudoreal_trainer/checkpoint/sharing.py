"""How the sharing of a phase follows from that of the phase before. Pure."""

from collections.abc import Sequence


def sources(before: Sequence[int | None], after: Sequence[int | None], what: str = "block") -> dict[int, int]:
    """New number -> the old one that its layers used. Entry l of each argument: the number of what layer l uses; None:
    it uses nothing of the kind.

    Raises ValueError when those layers used several old ones: then the new sharing does not refine the old one.
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
