"""Output of `pseudoreal plan` for a job on a cluster: whether each stage fits, and the necessary changes. Pure."""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.spec.pod import Topology
from pseudoreal_trainer.cli.plan_display import EXCHANGES
from pseudoreal_trainer.plan.mesh import Mesh
from pseudoreal_trainer.plan.placement.flows import Exchange, Flow, bytes_between
from pseudoreal_trainer.plan.placement.order import Place, worker_order

from pseudoreal_client.capacity.fit import Fit, PodSet
from pseudoreal_client.capacity.nodes import GPU_MEMORY, Node
from pseudoreal_client.capacity.pod_sets import PodNeeds, amount_text, pod_set_text

Json = dict[str, Any]

_MOST_NAMES = 4
"""Maximum number of nodes named per reason."""


@dataclass(frozen=True)
class TrafficLevel:
    """Traffic between the places of one kind, such as nodes."""

    places: str
    """Plural noun for the places: "nodes", or "values of KEY" with the label key of the topology."""
    count: int
    bytes: dict[Exchange, int]
    """Kind of exchange -> bytes per step."""

    def line(self) -> str:
        found = [f"{EXCHANGES[exchange]} {readable_bytes(size)}" for exchange, size in self.bytes.items() if size]
        return f"between {self.count} {self.places}, bytes a step: {', '.join(found) or 'none'}"

    def as_json(self) -> dict[str, Any]:
        return {"places": self.places, "count": self.count, "bytes_per_step": self.bytes}


@dataclass(frozen=True)
class StageReport:
    """Result for one stage. `problems`: reasons in the job itself why the stage cannot run."""

    title: str
    phase: str
    pods: PodSet
    need: PodNeeds | None
    fit: Fit
    nodes: Sequence[Node]
    problems: Sequence[str]
    levels: Sequence[TrafficLevel] = ()
    """Traffic of the ranks between domains and between nodes, if the pods are placed as in `fit`."""

    @property
    def can_run(self) -> bool:
        return self.fit.fits_ever and not self.problems

    @property
    def can_run_now(self) -> bool:
        return self.fit.fits_now and not self.problems

    def lines(self) -> Iterator[str]:
        yield f"{self.title}: {pod_set_text(self.pods)}"
        if self.need:
            device = f", and each GPU {readable_bytes(self.need.device)}" if self.need.device else ""
            memory, disk = readable_bytes(self.need.memory), readable_bytes(self.need.disk)
            yield f"  forecast: a pod needs {memory} of memory and {disk} of disk{device}"
        yield f"  {self._word()}"
        yield from (f"  {level.line()}" for level in self.levels)
        for sentence in (*self.problems, *self.sentences()):
            yield f"  - {sentence}"
        if not self.fit.fits_now:
            yield from (f"    {line}" for line in _grouped(self.fit.obstacles))

    def sentences(self) -> list[str]:
        """Return sentences about what to change or to wait for, and about unknown facts."""
        return [*self._changes(), *self._unknown()]

    def as_json(self) -> Json:
        return {
            "stage": self.title,
            "pods": self.pods.count,
            "requests": {name: float(amount) for name, amount in sorted(self.pods.requests.items())},
            "forecast": None if self.need is None else vars(self.need),
            "fits": self.can_run,
            "fits_now": self.can_run_now,
            "placement": self.fit.placement,
            "levels": [level.as_json() for level in self.levels],
            "obstacles": self.fit.obstacles,
            "reasons": [*self.problems, *self.sentences()],
        }

    def _word(self) -> str:
        if self.can_run_now:
            return f"fits: {', '.join(f'{node} {count}' for node, count in self.fit.placement.items())}"
        return "fits, but not now" if self.can_run else "does not fit"

    def _changes(self) -> Iterator[str]:
        if self.fit.fits_now:
            return
        room, wanted = self.fit.room_now, self.pods.count
        if self.fit.fits_ever:
            where = " on one node, where a claim keeps them," if self.pods.is_on_one_node else ""
            yield (
                f"there is room for {room} of {wanted} pods{where} now; the other pods wait until pods of other jobs"
                " end"
            )
            return
        too_large = [*self._too_large()]
        yield from too_large
        ever = self.fit.room_ever
        if ever and self.pods.is_on_one_node:
            yield (
                f"an empty node has room for {ever} of {wanted} pods, which a claim keeps on one node; lower"
                f" spec.phases[{self.phase}].workers or what a pod needs (resources, offload), add a larger node, or"
                " use a claim whose accessModes are [ReadWriteMany]"
            )
        elif ever:
            yield (
                f"empty nodes have room for {ever} of {wanted} pods; lower spec.phases[{self.phase}].workers or what a"
                " pod needs (resources, offload), or add nodes"
            )
        elif not too_large:
            yield "no node takes any of the pods; below it is said why" if self.nodes else "the cluster has no nodes"

    def _too_large(self) -> Iterator[str]:
        """Yield a sentence for each resource of which a pod needs more than the largest node has; likewise for the
        memory of a GPU."""
        for name, amount in sorted(self.pods.requests.items()):
            most = max((node.allocatable.get(name, Fraction()) for node in self.nodes), default=Fraction())
            if self.nodes and most < amount:
                yield (
                    f"a pod wants {amount_text(name, amount)}, and the most that a node has is"
                    f" {amount_text(name, most)}; lower what a pod needs (spec.phases[{self.phase}].resources,"
                    " offload), or add larger nodes"
                )
        known = [node.gpu_bytes for node in self.nodes if node.gpu_bytes is not None]
        if known and self.pods.device_bytes > max(known):
            yield (
                f"a GPU needs {readable_bytes(self.pods.device_bytes)}, and the largest has"
                f" {readable_bytes(max(known))}; offload units (spec.phases[{self.phase}].offload), raise"
                " batch.microBatches, or take more ranks"
            )

    def _unknown(self) -> Iterator[str]:
        silent = [node.name for node in self.nodes if node.gpu_bytes is None and self.fit.ever.get(node.name)]
        if self.pods.device_bytes and silent:
            yield (
                f"nobody says how much memory the GPUs of {_names(silent)} have, as the label {GPU_MEMORY} is missing;"
                f" each needs {readable_bytes(self.pods.device_bytes)}"
            )


def _grouped(obstacles: dict[str, str]) -> Iterator[str]:
    """Yield each obstacle once, with its nodes."""
    reasons: dict[str, list[str]] = {}
    for node, reason in obstacles.items():
        reasons.setdefault(reason, []).append(node)
    for reason, nodes in reasons.items():
        yield f"{_names(nodes)}: {reason}"


def _names(nodes: Sequence[str]) -> str:
    more = len(nodes) - _MOST_NAMES
    return ", ".join(nodes[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def traffic_levels(fit: Fit, topology: Topology | None, mesh: Mesh, flows: Sequence[Flow]) -> list[TrafficLevel]:
    """Return the levels over which the pods are spread, widest first.

    With a topology, workers are numbered as pods number themselves at run time (`worker_order`).
    """
    places = [Place(fit.domains.get(node, ""), node) for node, count in fit.placement.items() for _ in range(count)]
    order = worker_order(places, mesh, flows) if topology else range(len(places))
    of_ranks = [places[worker] for worker in order for _ in range(mesh.ranks // len(places))]
    levels = [_level("nodes", of_ranks, flows)]
    if topology:
        levels.insert(0, _level(f"values of {topology.key}", [place.domain for place in of_ranks], flows))
    return [level for level in levels if level.count > 1]


def _level(places: str, of_ranks: Sequence[Hashable], flows: Sequence[Flow]) -> TrafficLevel:
    return TrafficLevel(places, len(set(of_ranks)), bytes_between(flows, of_ranks))
