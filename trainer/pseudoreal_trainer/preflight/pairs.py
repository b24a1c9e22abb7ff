"""Who talks to whom, and when. Pure.

Ranks of the same number in their pods talk across pods, then ranks of one pod within it: times are compared only
within one of these networks. All meet in the rounds of a tournament. Three rounds give every rank at least two
partners, however many ranks there are; so a rank that fails with all its partners is told from the partner of such a
one.
"""

from dataclasses import dataclass
from typing import Literal

Network = Literal["across", "within"]

_ROUNDS = 3


@dataclass(frozen=True)
class Pairing:
    network: Network
    round: int
    partner: int


def pairings(rank: int, workers: int, processes: int) -> list[Pairing | None]:
    """The rank's pairings in all rounds, the same number for every rank; None for a round in which it is left over."""
    worker, local = divmod(rank, processes)
    found: list[Pairing | None] = []
    for number in range(_rounds(workers)):
        other = _partner(worker, workers, number)
        found.append(None if other is None else Pairing("across", number, other * processes + local))
    for number in range(_rounds(processes)):
        other = _partner(local, processes, number)
        found.append(None if other is None else Pairing("within", number, worker * processes + other))
    return found


def _rounds(members: int) -> int:
    return min(_ROUNDS, _cycle(members)) if members > 1 else 0


def _cycle(members: int) -> int:
    """Number of rounds in which everybody meets everybody."""
    return members - 1 + members % 2


def _partner(member: int, members: int, number: int) -> int | None:
    """The member's partner in a round, by the circle method: in each round, those who are their own partners meet the
    last one, or are left over."""
    cycle = _cycle(members)
    last = members - 1 if members % 2 == 0 else None
    if member == last:
        return number % cycle
    other = (2 * number - member) % cycle
    return last if other == member else other
