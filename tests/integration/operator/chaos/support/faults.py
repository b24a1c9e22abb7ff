"""Faults between the operator and the API server, as data."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from tests.support.depth import DEPTH


class Target(StrEnum):
    """Counted kinds of requests and changes, from 1. A request may count as several kinds."""

    READ = "read"
    DISCOVERY = "discovery"
    """Read request for the resources of the project's API group."""
    WRITE = "write"
    CHILD = "child"
    NEWS = "news"
    """Posting of an Event."""
    STATUS = "status"
    WATCH = "watch"
    CHANGE = "change"
    """Change reported by a watch."""
    JOB_CHANGE = "change of a job"
    """Change reported by kopf's watch of PseudoRealJobs."""
    CHILD_CHANGE = "change of a child"
    """Change reported by the watches of Jobs and pods."""


class Kind(StrEnum):
    DROP_REQUEST = "drop the request"
    DROP_ANSWER = "drop the answer"
    DELAY = "delay"
    HANG = "never answer"
    DUPLICATE = "forward twice"
    ANSWER_404 = "answer 404"
    ANSWER_409 = "answer 409"
    ANSWER_410 = "answer 410"
    ANSWER_429 = "answer 429"
    ANSWER_500 = "answer 500"
    REFUSE_TEXTS = "answer 400 to this and every later status that has a text"
    CUT = "cut"
    ERROR_410 = "ERROR 410 in the stream"
    ERROR_500 = "ERROR 500 in the stream"
    KILL_BEFORE = "kill the operator before forwarding"
    KILL_AFTER = "kill the operator after forwarding"


@dataclass(frozen=True)
class Fault:
    kind: Kind
    target: Target
    number: int

    def __str__(self) -> str:
        return f"{self.target} {self.number}: {self.kind}"


_ANSWERS = (Kind.ANSWER_404, Kind.ANSWER_409, Kind.ANSWER_410, Kind.ANSWER_429, Kind.ANSWER_500)
_ANY = (Kind.DROP_REQUEST, Kind.DROP_ANSWER, Kind.DELAY, Kind.HANG, *_ANSWERS)
_OF_WRITES = (*_ANY, Kind.DUPLICATE, Kind.KILL_BEFORE, Kind.KILL_AFTER)
_OF_CHANGES = (Kind.CUT, Kind.ERROR_410, Kind.ERROR_500)
_APPLICABLE = {
    Target.WRITE: _OF_WRITES,
    Target.STATUS: (Kind.REFUSE_TEXTS,),
    Target.CHANGE: _OF_CHANGES,
    Target.WATCH: (Kind.DROP_REQUEST, Kind.DELAY, *_ANSWERS),
    Target.READ: _ANY,
}
_SAMPLED = {
    Target.CHILD: (Kind.HANG, Kind.DROP_REQUEST, Kind.ANSWER_410, Kind.ANSWER_500, Kind.KILL_AFTER),
    Target.NEWS: (Kind.DROP_ANSWER, Kind.DUPLICATE, Kind.ANSWER_409, Kind.KILL_BEFORE),
    Target.STATUS: (
        *(Kind.DELAY, Kind.ANSWER_404, Kind.ANSWER_429, Kind.DROP_ANSWER, Kind.DUPLICATE),
        *(Kind.KILL_BEFORE, Kind.KILL_AFTER),
    ),
    Target.CHANGE: (Kind.ERROR_500,),
    Target.READ: (Kind.ANSWER_404, Kind.ANSWER_410),
    Target.WATCH: (Kind.ANSWER_429,),
}
# The number of requests differs between lives, and the last requests of a long life must be covered, too.
_MORE = 4


def every_fault(counts: Mapping[Target, int]) -> Iterator[Fault]:
    """Yield every applicable fault for a life with these numbers of targets."""
    for target, kinds in _APPLICABLE.items():
        for number in range(1, counts[target] + _MORE + 1):
            yield from (Fault(kind, target, number) for kind in kinds)


def sample(counts: Mapping[Target, int]) -> Iterator[Fault]:
    """Yield some faults of each kind."""
    chance = DEPTH.chance("pseudoreal")
    for target, kinds in _SAMPLED.items():
        for kind in kinds:
            yield Fault(kind, target, chance.randint(1, surely_reached(counts[target])))
    yield Fault(Kind.REFUSE_TEXTS, Target.STATUS, 1)


def surely_reached(count: int) -> int:
    """Return how many targets a shorter life reaches too: on a busy machine, a reconcile pass sees more changes at
    once. Some lives had 10 status writes where another had 13."""
    return int(count * 0.7)
