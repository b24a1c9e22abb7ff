"""Which worker has which ranks, so that little crosses between domains, and then between nodes. Pure.

The ranks of a worker are neighbours, so what is chosen is the order of the workers. Worker 0 stays the first: it holds
the rendezvous, and the operator listens to it. Most meshes look alike from both ends, so that this costs nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations, product

from pseudoreal_trainer.forecast.placement.flows import Flow
from pseudoreal_trainer.plan.mesh import DIMENSIONS, Coordinates, Dimension, Mesh

_MOST_TRIED = 7
"""Most workers of which all orders are tried: 720 of 7."""
_MOST_EXCHANGED = 64
"""Most workers of which pairs are tried in each other's places: two seconds of 64."""

Order = tuple[int, ...]
"""Entry i is the worker with the i-th ranks."""
Cost = tuple[int, int]
"""Bytes a step between domains, and between nodes."""


@dataclass(frozen=True, order=True)
class Place:
    """Where a worker runs."""

    domain: str
    """Value of the label of its node; empty where nobody says it."""
    node: str


@dataclass(frozen=True)
class _Problem:
    """`places`: those of the workers, by number."""

    places: Sequence[Place]
    mesh: Mesh
    flows: Sequence[Flow]

    @property
    def ranks_per_worker(self) -> int:
        return self.mesh.ranks // len(self.places)

    @cached_property
    def between_slots(self) -> list[tuple[frozenset[int], int]]:
        """The flows between slots, a slot being the ranks of a worker: slots and bytes."""
        merged: Counter[frozenset[int]] = Counter()
        for flow in self.flows:
            merged[frozenset(rank // self.ranks_per_worker for rank in flow.ranks)] += flow.bytes
        return [(slots, size) for slots, size in merged.items() if len(slots) > 1]

    @cached_property
    def of_slot(self) -> list[list[int]]:
        """For each slot the numbers of the flows between slots that it takes part in."""
        found: list[list[int]] = [[] for _ in self.places]
        for number, (slots, _) in enumerate(self.between_slots):
            for slot in slots:
                found[slot].append(number)
        return found

    def cost(self, order: Sequence[int]) -> Cost:
        return self._cost(range(len(self.between_slots)), order)

    def cost_around(self, slots: Sequence[int], order: Sequence[int]) -> Cost:
        """The part of the cost that depends on who is in these slots."""
        return self._cost({number for slot in slots for number in self.of_slot[slot]}, order)

    def _cost(self, numbers: Iterable[int], order: Sequence[int]) -> Cost:
        domains = nodes = 0
        for number in numbers:
            slots, size = self.between_slots[number]
            entered = {self.places[order[slot]] for slot in slots}
            if len(entered) > 1:
                nodes += size * len(entered)
                found = len({place.domain for place in entered})
                domains += size * found if found > 1 else 0
        return domains, nodes


def worker_order(places: Sequence[Place], mesh: Mesh, flows: Sequence[Flow]) -> Order:
    """The order of the workers with which the fewest bytes cross between domains, and of these the fewest between
    nodes. `places`: those of the workers, which have equally many of the mesh's ranks.

    Of few workers every order is tried. Of more, domain after domain is filled along the dimensions of the mesh, and
    what comes of that is improved by exchanging pairs: it may miss the optimum. Of orders that cost the same it is the
    first by numbers.
    """
    problem = _Problem(places, mesh, flows)
    workers = range(len(places))
    if len(places) <= _MOST_TRIED:
        return min(((0, *others) for others in permutations(workers[1:])), key=problem.cost)
    found = dict.fromkeys(_candidates(problem))
    if len(places) <= _MOST_EXCHANGED:
        found = dict.fromkeys(_improved(problem, order) for order in found)
    return min(found, key=problem.cost)


def _candidates(problem: _Problem) -> Iterator[Order]:
    slots = range(len(problem.places))
    yield tuple(slots)
    at = [problem.mesh.coordinates(slot * problem.ranks_per_worker) for slot in slots]
    dimensions = [name for name in DIMENSIONS if problem.mesh.sizes[name] > 1]
    for grouped in (_by_place(problem.places, largest) for largest in (True, False)):
        for nested, along in product(permutations(dimensions), (_forwards, _backwards)):
            path = sorted(slots, key=lambda slot: [along(problem.mesh, at[slot], name) for name in nested])
            order = dict(zip(path, grouped, strict=True))
            yield tuple(order[slot] for slot in slots)


def _forwards(_: Mesh, at: Coordinates, dimension: Dimension) -> int:
    found: int = getattr(at, dimension)
    return found


def _backwards(mesh: Mesh, at: Coordinates, dimension: Dimension) -> int:
    """The first, then from the last one down: the first and the last pipeline rank may have a unit in common."""
    return -_forwards(mesh, at, dimension) % mesh.sizes[dimension]


def _by_place(places: Sequence[Place], largest_first: bool) -> list[int]:
    """The workers domain by domain and node by node, those of worker 0 first, then by size."""
    sign = -1 if largest_first else 1
    domains, nodes = Counter(place.domain for place in places), Counter(places)
    first = places[0]

    def key(worker: int) -> tuple[bool, int, str, bool, int, Place, int]:
        place = places[worker]
        in_domain, size = place.domain != first.domain, sign * domains[place.domain]
        return in_domain, size, place.domain, place != first, sign * nodes[place], place, worker

    return sorted(range(len(places)), key=key)


def _improved(problem: _Problem, order: Order) -> Order:
    """The order after exchanges of two workers, as long as one of them lowers the cost."""
    best, pairs = list(order), [*combinations(range(1, len(order)), 2)]
    while sum(_lowers(problem, best, pair) for pair in pairs):
        pass
    return tuple(best)


def _lowers(problem: _Problem, order: list[int], pair: tuple[int, int]) -> bool:
    """Exchanges the workers in two slots where that lowers the cost: whether it did."""
    first, second = pair
    before = problem.cost_around(pair, order)
    order[first], order[second] = order[second], order[first]
    if problem.cost_around(pair, order) < before:
        return True
    order[first], order[second] = order[second], order[first]
    return False
