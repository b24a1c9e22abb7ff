"""Checkpoints of a job and their descent, as a graph. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from pseudoreal_trainer.checkpoint.manifest import Head, checkpoint_name
from pseudoreal_trainer.report.phases import Shape
from pseudoreal_trainer.report.steps import Steps


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is there, or of which another one or the metrics tell."""

    name: str
    phase: str
    step: int
    is_kept: bool
    """False: it was removed, or is in another folder."""
    why: str
    """Why it is kept, or how it is known."""
    parent: str | None
    link: str | None
    """Checkpoint whose files it refers to; None: the files are its own."""
    execution: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    shape: Shape | None = None
    bytes: int | None = None
    seconds: float | None = None
    """Seconds from the end of the step to the commit."""
    stall_seconds: float | None = None


@dataclass(frozen=True)
class Edge:
    """Descent of a checkpoint from its parent, or a link to the files of another one."""

    source: str
    target: str
    is_link: bool


@dataclass(frozen=True)
class Lineage:
    checkpoints: Sequence[Checkpoint]
    """In the order of the phases, then of the steps."""
    edges: Sequence[Edge]


def lineage_of(heads: Sequence[Head], steps: Steps) -> Lineage:
    """Return the graph. `heads`: all checkpoints of the job that are there."""
    linked = {head.link.folder for head in heads if head.link is not None}
    saves = {save.step: save for save in steps.saves}
    found: dict[str, Checkpoint] = {}
    for head in heads:
        save = None if head.delinked else saves.get(head.step)
        found[head.name] = Checkpoint(
            name=head.name,
            phase=head.phase,
            step=head.step,
            is_kept=True,
            why=_why_kept(head, linked),
            parent=head.parent,
            link=None if head.link is None else head.link.folder,
            execution=head.execution,
            loss=head.loss,
            validation_loss=head.validation_loss,
            shape=Shape.of(head.model, head.sharing),
            bytes=None if save is None else save.bytes,
            seconds=None if save is None else save.seconds,
            stall_seconds=None if save is None else save.stall_seconds,
        )
    for gone in _removed(heads, steps):
        found.setdefault(gone.name, gone)
    order = {name: index for index, name in enumerate(_phases(heads, steps))}
    checkpoints = sorted(found.values(), key=lambda each: (order.get(each.phase, len(order)), each.step))
    return Lineage(checkpoints, _edges(checkpoints))


def _phases(heads: Sequence[Head], steps: Steps) -> dict[str, None]:
    return dict.fromkeys([*(head.phase for head in heads), *steps.phases])


def _why_kept(head: Head, linked: set[str]) -> str:
    if head.name in linked:
        return "kept: another checkpoint refers to its files"
    if head.delinked:
        return "kept: the first of its phase"
    if head.phase_complete:
        return "kept: the last of its phase"
    return "kept by checkpoint.keepLast or keepEvery"


def _removed(heads: Sequence[Head], steps: Steps) -> list[Checkpoint]:
    """Return the checkpoints that are not there: saved ones that the metrics tell of, and parents."""
    there = {head.name for head in heads}
    found = []
    for save in steps.saves:
        index = int(steps.step.searchsorted(save.step))
        if index < len(steps) and steps.step[index] == save.step:
            phase = steps.phases[int(steps.phase[index])]
            name = checkpoint_name(phase, save.step)
            if name not in there:
                cost = (save.bytes, save.seconds, save.stall_seconds)
                found.append(_gone(name, phase, save.step, "removed by retention", *cost))
    for head in heads:
        if head.parent is not None and head.parent not in there:
            phase, _, step = head.parent.rpartition("-")
            if step.isdecimal() and len(step) < 16:
                found.append(_gone(head.parent, phase, int(step), "removed, or of the job that this one continues"))
    return found


def _gone(
    name: str,
    phase: str,
    step: int,
    why: str,
    size: int | None = None,
    seconds: float | None = None,
    stall: float | None = None,
) -> Checkpoint:
    return Checkpoint(name, phase, step, False, why, None, None, bytes=size, seconds=seconds, stall_seconds=stall)


def _edges(checkpoints: Sequence[Checkpoint]) -> list[Edge]:
    """Return the edges to each checkpoint. Where a parent is not recorded, because the checkpoint was removed, the one
    before it in its phase stands for the parent."""
    names = {each.name for each in checkpoints}
    edges, before = [], dict[str, str]()
    for each in checkpoints:
        parent = each.parent if each.is_kept else before.get(each.phase)
        if parent in names and parent != each.name:
            assert parent is not None, "None is no name"
            edges.append(Edge(parent, each.name, is_link=each.link == parent))
        if each.link is not None and each.link != parent and each.link in names:
            edges.append(Edge(each.link, each.name, is_link=True))
        before[each.phase] = each.name
    return edges
