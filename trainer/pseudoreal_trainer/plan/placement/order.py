"""Assignment of ranks to workers with little traffic between domains, and then between nodes. Pure.

The ranks of a worker are consecutive, so only the order of the workers is chosen. Worker 0 stays first: it holds the
rendezvous, and the operator listens to it. Most meshes are symmetric, so fixing one end costs nothing.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, permutations, product

from pseudoreal_trainer.plan.mesh import DIMENSIONS, Coordinates, Dimension, Mesh
from pseudoreal_trainer.plan.placement.flows import Flow

_MOST_TRIED = 7
"""Maximum number of workers for which all orders are tried: 720 orders of 7 workers, because the first worker is
fixed."""
_MOST_EXCHANGED = 64
"""Maximum number of workers for which pairs are exchanged: two seconds for 64 workers."""

Order = tuple[int, ...]
"""Entry i is the worker with the i-th block of ranks."""
Cost = tuple[int, int]
"""(bytes per step between domains, bytes per step between nodes), compared in this order."""


@dataclass(frozen=True, order=True)
class Place:
    """Location of a worker."""

    domain: str
    """Value of the topology label of the node; empty if unknown."""
    node: str


@dataclass(frozen=True)
class _Problem:
    places: Sequence[Place]
    """Place of each worker, by its number."""
    mesh: Mesh
    flows: Sequence[Flow]

    @property
    def ranks_per_worker(self) -> int:
        return self.mesh.ranks // len(self.places)

    @cached_property
    def between_slots(self) -> list[tuple[frozenset[int], int]]:
        """(slots, bytes) of each set of several slots that flows connect; flows between the same slots are summed. A
        slot is the block of ranks of one worker."""
        merged: Counter[frozenset[int]] = Counter()
        for flow in self.flows:
            merged[frozenset(rank // self.ranks_per_worker for rank in flow.ranks)] += flow.bytes
        return [(slots, size) for slots, size in merged.items() if len(slots) > 1]

    @cached_property
    def of_slot(self) -> list[list[int]]:
        """Entry i: the indices in `between_slots` of the entries with slot i."""
        found: list[list[int]] = [[] for _ in self.places]
        for number, (slots, _) in enumerate(self.between_slots):
            for slot in slots:
                found[slot].append(number)
        return found

    def cost(self, order: Sequence[int]) -> Cost:
        return self._cost(range(len(self.between_slots)), order)

    def cost_around(self, slots: Sequence[int], order: Sequence[int]) -> Cost:
        """Return the part of the cost that depends on the workers in these slots."""
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
    """Return the order of the workers with the fewest bytes between domains, then between nodes. `places`: place of
    each worker; all workers have equally many ranks of the mesh.

    For few workers, every order is tried. For more workers, candidates fill domain after domain along the dimensions of
    the mesh, and are then improved by exchanging pairs of workers; this may miss the optimum. Among orders of equal
    cost, the first one tried wins; the order of the worker numbers is tried first.
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
    """Return a sort key: coordinate 0 first, then the others from last to first. So the first and the last pipeline
    rank, which may share a unit, are neighbours."""
    return -_forwards(mesh, at, dimension) % mesh.sizes[dimension]


def _by_place(places: Sequence[Place], largest_first: bool) -> list[int]:
    """Return the workers domain by domain and node by node. The domain and node of worker 0 come first; the others
    follow by number of workers, largest first if `largest_first`, else smallest first."""
    sign = -1 if largest_first else 1
    domains, nodes = Counter(place.domain for place in places), Counter(places)
    first = places[0]

    def key(worker: int) -> tuple[bool, int, str, bool, int, Place, int]:
        place = places[worker]
        in_domain, size = place.domain != first.domain, sign * domains[place.domain]
        return in_domain, size, place.domain, place != first, sign * nodes[place], place, worker

    return sorted(range(len(places)), key=key)


def _improved(problem: _Problem, order: Order) -> Order:
    """Return the order after exchanging pairs of workers for as long as an exchange lowers the cost."""
    best, pairs = list(order), [*combinations(range(1, len(order)), 2)]
    while sum(_lowers(problem, best, pair) for pair in pairs):
        pass
    return tuple(best)


def _lowers(problem: _Problem, order: list[int], pair: tuple[int, int]) -> bool:
    """Exchange the workers in two slots if that lowers the cost; return True if exchanged."""
    first, second = pair
    before = problem.cost_around(pair, order)
    order[first], order[second] = order[second], order[first]
    if problem.cost_around(pair, order) < before:
        return True
    order[first], order[second] = order[second], order[first]
    return False
