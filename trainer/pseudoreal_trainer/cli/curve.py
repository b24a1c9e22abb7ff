"""Plots a curve in the terminal with Braille characters, each 2 x 4 dots. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

_BLANK = 0x2800
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a character's dots, by row and column (Unicode block "Braille Patterns")."""
_END = "┊"
"""Mark of the end of a phase."""


def plot(losses: Mapping[int, float], width: int, height: int, ends: Sequence[int] = ()) -> list[str]:
    """Return lines of `width` characters: `height` lines of curve, then a line with the steps; empty without losses.

    A column shows the mean of its losses. `ends` are the last steps of phases.
    """
    if not losses:
        return []
    low, high = min(losses.values()), max(losses.values())
    labels = [f"{value:.4g}" for value in (high, low)]
    margin = max(map(len, labels))
    room = max(1, width - margin - 2)
    first, last = min(losses), max(losses)
    rows = _cells(losses, room, height)
    for end in ends:
        if first < end < last:
            _mark(rows, (end - first) * (room - 1) // (last - first))
    names = [labels[0], *[""] * (height - 2), labels[1]] if height > 1 else labels[:1]
    lines = [f"{name:>{margin}} ┤{''.join(row)}".rstrip() for name, row in zip(names, rows, strict=True)]
    return [*lines, " " * (margin + 2) + _axis(first, last, room)]


def _cells(losses: Mapping[int, float], width: int, height: int) -> list[list[str]]:
    bits = [[0] * width for _ in range(height)]
    low, high = min(losses.values()), max(losses.values())
    for x, loss in _means(losses, 2 * width).items():
        # The lowest loss is in the last row of dots.
        y = round((high - loss) / (high - low) * (4 * height - 1)) if high > low else 2 * height
        bits[y // 4][x // 2] |= _DOTS[y % 4][x % 2]
    return [[chr(_BLANK + cell) if cell else " " for cell in row] for row in bits]


def _means(losses: Mapping[int, float], columns: int) -> dict[int, float]:
    """Return the mean loss of each column of dots."""
    first, last = min(losses), max(losses)
    found = defaultdict[int, list[float]](list)
    for step, loss in losses.items():
        found[(step - first) * (columns - 1) // max(1, last - first)].append(loss)
    return {x: fmean(values) for x, values in found.items()}


def _mark(rows: list[list[str]], x: int) -> None:
    for row in rows:
        if row[x] == " ":
            row[x] = _END


def _axis(first: int, last: int, width: int) -> str:
    left, right = f"step {first:,}", f"{last:,}"
    return left if last == first else f"{left}{right:>{max(len(right) + 1, width - len(left))}}"
