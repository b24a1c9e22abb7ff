"""The nodes of an execution's ranks, as the status records them: node by node, in ranges, within the limits of the
status. Pure."""

from pseudoreal_api.status.status import MOST_NODES, MOST_RANGES, NodeRanks, Placement, PseudoRealJobStatus

from pseudoreal_operator.observe.ranks import first_ranks, ranges_text
from pseudoreal_operator.observe.stages import StageKind, current_stage
from pseudoreal_operator.observe.view import View


def placement(view: View) -> Placement | None:
    """Return the placement of the present execution once the nodes of all its ranks are known; until then the
    previous one."""
    known = view.observed.status.placement
    if not _trains(view.status):
        return known
    nodes = {pod.index: pod.node for pod in sorted(view.pods, key=lambda pod: pod.is_alive) if pod.node}
    if nodes.keys() != set(range(view.workers)) or not _are_numbered(view):
        return known
    return _placement(view, nodes)


def _trains(status: PseudoRealJobStatus) -> bool:
    stage = current_stage(status.phases)
    return stage is not None and stage.kind is StageKind.TRAIN


def _are_numbered(view: View) -> bool:
    """Return whether the ranks of each pod are known. With a topology only the pods know their ranks."""
    return view.spec.scheduling.topology is None or len(view.reported_first_ranks) == view.workers


def _placement(view: View, nodes: dict[int, str]) -> Placement:
    """Return the placement. `nodes`: worker number -> node."""
    size, execution = view.ranks_per_pod, view.execution
    firsts = first_ranks(view.workers, size, view.reported_first_ranks)
    on_node: dict[str, list[int]] = {}
    for worker in sorted(nodes, key=firsts.__getitem__):
        on_node.setdefault(nodes[worker], []).append(worker)
    found = []
    for node, workers in list(on_node.items())[:MOST_NODES]:
        ranks = ranges_text(rank for worker in workers for rank in range(firsts[worker], firsts[worker] + size))
        numbers = ranges_text(workers)
        if max(len(ranks), len(numbers)) <= MOST_RANGES:
            found.append(NodeRanks(node=node, ranks=ranks, workers=numbers))
    omitted = len(on_node) - len(found)
    return Placement(phase_name=execution.phase, execution=execution.number, nodes=found, omitted_nodes=omitted)
