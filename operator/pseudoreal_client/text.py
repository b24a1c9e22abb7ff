"""Times, numbers and columns in readable form. Pure."""

from collections.abc import Iterable, Sequence
from datetime import datetime

_UNITS = (("d", 86_400), ("h", 3600), ("m", 60), ("s", 1))
NOTHING = "-"


def duration(seconds: float) -> str:
    """Return a duration in its two largest units: 93784 seconds -> 1d2h."""
    left, parts = max(0, round(seconds)), list[str]()
    for unit, size in _UNITS:
        count, left = divmod(left, size)
        # After the first unit, a unit with count 0 adds an empty part, which counts as the second unit.
        if count or parts:
            parts.append(f"{count}{unit}" if count else "")
    return "".join(parts[:2]) or "0s"


def age(since: str | None, now: datetime) -> str:
    """Return the duration from `since`, an RFC 3339 time, to `now`, as text; "-" if `since` is None."""
    return NOTHING if since is None else duration((now - datetime.fromisoformat(since)).total_seconds())


def number(value: object) -> str:
    return NOTHING if value is None else f"{value:,}" if isinstance(value, int) else str(value)


def columns(rows: Iterable[Sequence[str]]) -> list[str]:
    """Return one line per row, with the cells of a column aligned."""
    table = [[*row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["   ".join(map(str.ljust, row, widths)).rstrip() for row in table]
