"""Schedule of the network checks: the pairs of ranks in each round. Pure.

First, ranks with the same local rank are paired across pods; then the ranks of one pod are paired with each other.
These are two networks: times are compared only within a network. Pairs change as in a round-robin tournament. With
three or more members, three rounds give every rank at least two partners. So a rank that fails with all its partners
can be distinguished from a rank that fails with one faulty partner.
"""

from dataclasses import dataclass
from typing import Literal

Network = Literal["across", "within"]

_ROUNDS = 3


@dataclass(frozen=True)
class Pairing:
    """Pairing of a rank with the rank `partner` in one round."""

    network: Network
    round: int
    partner: int


def pairings(rank: int, workers: int, processes: int) -> list[Pairing | None]:
    """Return the rank's pairing of each round; None for a round without a partner. All ranks have the same number of
    rounds."""
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
    """Return the number of rounds until every member has been paired with every other member."""
    return members - 1 + members % 2


def _partner(member: int, members: int, number: int) -> int | None:
    """Return the member's partner in a round, by the circle method.

    If the formula pairs a member with itself: with an even number of members, the partner is the last member; with an
    odd number, there is no partner.
    """
    cycle = _cycle(members)
    last = members - 1 if members % 2 == 0 else None
    if member == last:
        return number % cycle
    other = (2 * number - member) % cycle
    return last if other == member else other
