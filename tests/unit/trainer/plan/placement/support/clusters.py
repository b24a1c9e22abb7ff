"""Layouts and small clusters, and bytes that cross between their places, counted message by message."""

import random
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations, product
from typing import Any

from pseudoreal_trainer.plan.effects import traffic_bytes
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.lower import step_plan
from pseudoreal_trainer.plan.placement.flows import Flow, flows_of
from pseudoreal_trainer.plan.placement.order import Place
from pseudoreal_trainer.plan.records import Fetch, Reduce, Send
from pseudoreal_trainer.plan.sizes import Sizes

from tests.unit.trainer.plan.support.cases import make_layout, make_sizes


@dataclass(frozen=True)
class Job:
    layout: Layout
    sizes: Sizes
    workers: int

    @property
    def ranks_per_worker(self) -> int:
        return self.layout.mesh.ranks // self.workers

    @cached_property
    def flows(self) -> list[Flow]:
        return flows_of(self.layout, self.sizes, step_plan(self.layout))

    def of_ranks(self, order: Sequence[int], places: Sequence[Place]) -> list[Place]:
        """Return the place of each rank, given the order of workers."""
        return [places[worker] for worker in order for _ in range(self.ranks_per_worker)]


def job(
    workers: int, pipeline: int = 1, per_worker: int = 1, *, shared: bool = False, tied: bool = False, **layout: Any
) -> Job:
    """Return a job. With `shared`, all layers use one block; with `tied`, embedding and head share their matrix."""
    layers = max(pipeline, 6)
    blocks = (0,) * layers if shared else tuple(range(layers))
    data = workers * per_worker // pipeline
    made = make_layout(layers, pipeline, layer_blocks=blocks, data=data, ends_are_one=tied, **layout)
    embeddings = "Tied" if tied else "Separate"
    sizes = make_sizes(layers, blocks=1 if shared else None, micro_batch=8, embeddings=embeddings)
    return Job(made, sizes, workers)


def jobs(most_workers: int) -> Iterator[Job]:
    """Yield jobs of up to `most_workers` workers on every mesh, with one or two ranks per worker."""
    for workers, per_worker in product(range(2, most_workers + 1), (1, 2)):
        ranks = workers * per_worker
        for pipeline in _divisors(ranks):
            for replicas, sharding in ((1, "None"), *((number, "Full") for number in _divisors(ranks // pipeline))):
                for order, shared in (("Layered", False), ("Layered", True), ("GPipe", False), ("GPipe", True)):
                    cut = {"order": order, "sharding": sharding, "replicas": replicas}
                    yield job(workers, pipeline, per_worker, shared=shared, tied=not shared and pipeline > 2, **cut)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


def somewhere(workers: int, chance: random.Random) -> list[Place]:
    """Draw a place for each worker: at most one node per worker, in at most three domains."""
    domains = chance.randint(1, 3)
    nodes = [Place(f"rack-{chance.randrange(domains)}", f"node-{n}") for n in range(chance.randint(1, workers))]
    return [chance.choice(nodes) for _ in range(workers)]


def counted(job: Job, places: Sequence[Hashable]) -> Counter[str]:
    """Return the bytes that cross between places, counted from the records of each rank. `places` has the
    place of each rank. The best order of each ring is found by trying all."""
    total: Counter[str] = Counter()
    mesh = job.layout.mesh
    plan = step_plan(job.layout)
    for rank in range(mesh.ranks):
        here = mesh.coordinates(rank)
        for record in plan[here.pipeline]:
            sent = traffic_bytes(job.layout, job.sizes, (record,))
            if isinstance(record, Send):
                total["pipeline"] += (places[rank] != places[mesh.at_pipeline(rank, record.peer)]) * sent["pipeline"]
            elif isinstance(record, Fetch | Reduce):
                shards = [
                    other
                    for other in range(mesh.ranks)
                    if mesh.coordinates(other).pipeline in job.layout.users[record.unit]
                    and mesh.coordinates(other).replica == here.replica
                ]
                replicas = next(group for group in mesh.groups("replica") if rank in group)
                total["shards"] += _first(rank, shards) * sent["collective"] * _hops(shards, places)
                total["replicas"] += _first(rank, replicas) * sent["replicas"] * _hops(replicas, places)
    return total


def _first(rank: int, ring: Sequence[int]) -> bool:
    """Return whether the ring is counted at this rank, so that each ring counts once."""
    return rank == min(ring)


def _hops(ring: Sequence[int], places: Sequence[Hashable]) -> int:
    """Return the fewest adjacent pairs in different places, over all orders of the ring."""
    first, *others = ring
    return min(
        sum(places[a] != places[b] for a, b in pairwise([first, *order, first])) for order in permutations(others)
    )
