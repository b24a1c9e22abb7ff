"""Which rank holds up the others, from what all of them last said. Pure."""

from collections.abc import Sequence
from statistics import median_low

from pseudoreal_api.reports import RankSign


def suspects(signs: Sequence[RankSign]) -> list[int]:
    """Ranks that hold up the others, the likeliest first; [] where nobody can be singled out."""
    stopped = [sign.rank for sign in signs if sign.process in ("T", "Z")]
    return stopped or [sign.rank for sign in signs if sign.place != "waiting"]


def stragglers(signs: Sequence[RankSign], factor: float) -> list[tuple[int, float]]:
    """(rank, ratio to the median) of those that compute more than `factor` times as long as the median rank."""
    busy = {sign.rank: sign.busy_seconds for sign in signs if sign.busy_seconds is not None}
    middle = median_low(busy.values()) if len(busy) > 1 else 0.0
    return [(rank, seconds / middle) for rank, seconds in busy.items() if middle and seconds > factor * middle]
