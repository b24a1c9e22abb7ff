"""Output of `pseudoreal describe`. Pure."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from pseudoreal.observed_job import ObservedJob, one_line, share
from pseudoreal_api.resolved.elastic import laid_out
from pseudoreal_api.resolved.resolve import UnresolvableJob, growth_text, rank_counts, state_sharding
from pseudoreal_api.status.status import Fault, PhaseStatus, Progress
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_operator.observe.view import Pod

from pseudoreal_client.text import NOTHING, age, columns, duration, number
from pseudoreal_client.view.ranks import node_map, rank_map

Json = dict[str, Any]

_NEWEST_EVENTS = 10


def description(job: ObservedJob, pods: Sequence[Pod], events: Sequence[Json], now: datetime) -> list[str]:
    """Return the lines of the description. `pods` are the pods of the newest execution."""
    lines = columns([[f"{name}:", value] for name, value in facts(job, now)])
    lines += _part("Phases", [*phase_table(job, now), *_growths(job)])
    lines += _part("Layouts", _layouts(job))
    lines += _part("Ranks", rank_map(job, pods, now))
    lines += _part(_nodes_title(job), node_map(job))
    lines += _part("Requests", _requests(job))
    lines += _part("Faults", _faults(job, now))
    lines += _part("Conditions", _conditions(job))
    return lines + _part("Events", _events(events, now))


def _nodes_title(job: ObservedJob) -> str:
    placement = job.status.placement
    return f"Nodes of phase {placement.phase_name}, execution {placement.execution}" if placement else "Nodes"


def _experts(progress: Progress) -> Iterator[tuple[str, str]]:
    if load := progress.experts:
        spread = f"largest load {load.largest} times the mean, idle {load.idle}, choices refused {load.dropped}"
        yield "Experts", f"{spread}, router entropy {load.router_entropy} nats"


def facts(job: ObservedJob, now: datetime) -> Iterator[tuple[str, str]]:
    """Yield label and value of each summary line of a job."""
    status, progress = job.status, job.status.progress
    yield "Job", f"{job.name} in namespace {job.namespace}"
    yield "State", _state(job)
    if job.reason and job.reason.message:
        yield "Reason", one_line(job.reason.message)
    if progress:
        yield "Step", f"{share(progress)}, {progress.tokens:,} tokens"
        yield "Loss", f"{progress.loss or NOTHING}, of the validation text {progress.validation_loss or NOTHING}"
        yield "Rate", f"{progress.tokens_per_second or NOTHING} tokens/s"
        yield from _experts(progress)
    yield from _remaining(job, now)
    yield from _workers(job)
    if status.checkpoint:
        saved = f", saved {age(status.checkpoint.saved_time, now)} ago" if status.checkpoint.saved_time else ""
        yield "Checkpoint", f"{status.checkpoint.latest} at step {status.checkpoint.step:,}{saved}"
    yield "Restarts", str(status.restarts)
    if found := status.restarts_in_place:
        yield (
            "In place",
            (
                f"{found.restarts} of execution {found.execution}, the last time for this reason:"
                f" {one_line(found.message)}"
            ),
        )
    yield "Age", age(job.created, now)
    if status.avoided_nodes:
        yield "Avoided nodes", ", ".join(status.avoided_nodes)


def _state(job: ObservedJob) -> str:
    status = job.status
    where = f", phase {status.current_phase}" if status.current_phase else ""
    asked = ", asked to suspend" if job.is_suspended and status.state not in ("Suspended", "Complete", "Failed") else ""
    return f"{status.state}{where}, execution {status.execution}{asked}"


def _workers(job: ObservedJob) -> Iterator[tuple[str, str]]:
    """Yield the number of workers of an elastic phase, if fewer than all, and the reason."""
    found = job.status.elastic
    if found is None or found.phase_name != job.status.current_phase:
        return
    phase = job.phase(found.phase_name)
    more = f" The operator tries more after {found.grow_after}." if found.grow_after else ""
    yield "Workers", f"{found.workers} of {phase.workers if phase else NOTHING}: {one_line(found.message)}{more}"


def _remaining(job: ObservedJob, now: datetime) -> Iterator[tuple[str, str]]:
    phase, whole = job.remaining_of_phase(now), job.remaining_of_job(now)
    if phase is not None:
        of_job = f", {duration(whole)} of the job at this rate" if whole is not None else ""
        yield "Remaining", f"{duration(phase)} of phase {job.status.current_phase}{of_job}"


def _part(title: str, lines: list[str]) -> list[str]:
    return ["", f"{title}:", *(f"  {line}" for line in lines)] if lines else []


def phase_table(job: ObservedJob, now: datetime) -> list[str]:
    """Return a table with one line per phase."""
    heads = ("PHASE", "STATE", "ENDS AT", "STEP", "LOSS", "VAL-LOSS", "TOOK", "CHECKPOINT")
    return columns([heads, *(_phase(job, name, now) for name in job.phase_names)])


def _growths(job: ObservedJob) -> list[str]:
    """Return a line for each phase with more layers than the phase before."""
    if job.spec is None:
        return []
    texts = ((phase.name, growth_text(job.spec, index)) for index, phase in enumerate(job.spec.phases))
    return [f"{name}: {text}" for name, text in texts if text]


def _phase(job: ObservedJob, name: str, now: datetime) -> list[str]:
    found = job.phase_status(name) or PhaseStatus(name=name, state="Pending")
    progress = job.status.progress if name == job.status.current_phase else None
    step = found.step if found.step is not None or progress is None else progress.step
    loss = found.loss or (progress.loss if progress else None) or NOTHING
    validation = found.validation_loss or (progress.validation_loss if progress else None) or NOTHING
    end = found.end_checkpoint or NOTHING
    return [name, found.state, _until(job, name), number(step), loss, validation, _took(found, now), end]


def _until(job: ObservedJob, name: str) -> str:
    phase = job.phase(name)
    if phase is None:
        return NOTHING
    bounds = [f"step {phase.until.step:,}"] if phase.until.step is not None else []
    bounds += [f"{phase.until.tokens:,} tokens"] if phase.until.tokens is not None else []
    bounds += [f"validation loss {phase.until.validation_loss}"] if phase.until.validation_loss is not None else []
    bounds += ["unlike gradients"] if phase.until.gradient_correlation is not None else []
    return " or ".join(bounds)


def _took(phase: PhaseStatus, now: datetime) -> str:
    if phase.start_time is None:
        return NOTHING
    return age(phase.start_time, datetime.fromisoformat(phase.completion_time) if phase.completion_time else now)


def _layouts(job: ObservedJob) -> list[str]:
    """Return the layout of each phase, as its job says, with what the job omits filled, or as chosen for layout Auto.
    Notes have the estimate behind each choice. A layout that is still to be chosen is left out."""
    chosen = {phase.name: phase.layout for phase in job.status.phases if phase.layout}
    rows = [
        (name, *cells)
        for name in job.phase_names
        if (cells := _chosen_layout(chosen[name]) if name in chosen else _given_layout(job, name))
    ]
    if not rows:
        return []
    heads: tuple[str, ...] = (
        *("PHASE", "PIPELINE", "REPLICAS", "EXPERT-RANKS", "CONTEXT-RANKS", "TENSOR-RANKS"),
        *("SCHEDULE", "SHARDING", "MICRO-BATCHES", "KEEP", "STEP"),
    )
    for head in ("CONTEXT-RANKS", "TENSOR-RANKS"):
        at = heads.index(head)
        if all(row[at] == "1" for row in rows):
            heads, *rows = [row[:at] + row[at + 1 :] for row in (heads, *rows)]
    notes = [
        f"{one_line(name)}: {one_line(one.bottleneck)}, on {one_line(one.hardware)}" for name, one in chosen.items()
    ]
    return [*columns([heads, *rows]), *notes]


def _chosen_layout(layout: ChosenLayout) -> list[str]:
    counts = map(
        str, (layout.pipeline, layout.replicas, layout.expert_ranks, layout.context_ranks, layout.tensor_ranks)
    )
    words = map(one_line, (layout.schedule, layout.state_sharding, str(layout.micro_batches), layout.keep))
    return [*counts, *words, f"{one_line(layout.step_time)} s"]


def _given_layout(job: ObservedJob, name: str) -> list[str]:
    """Return the cells of a phase without layout Auto; empty if this release cannot read the phase."""
    phase, elastic = job.phase(name), job.status.elastic
    if job.spec is None or phase is None or phase.parallelism.layout == "Auto":
        return []
    asked = phase.parallelism
    try:
        if elastic is not None and elastic.phase_name == name:
            phase = laid_out(job.spec, phase, elastic.workers)
        ranks = rank_counts(job.spec, phase)
    except UnresolvableJob:
        return []
    counts = map(str, (ranks.pipeline, asked.replicas, asked.expert_ranks, asked.context_ranks, asked.tensor_ranks))
    micro_batches, keep = str(phase.batch.micro_batches), phase.activations.keep
    return [*counts, asked.schedule, state_sharding(job.spec, phase, ranks), micro_batches, keep, NOTHING]


def _requests(job: ObservedJob) -> list[str]:
    if job.spec is None or not job.spec.requests:
        return []
    served = job.status.served_requests
    rows = [(r.id, r.type, r.phase, "served" if r.id in served else "open") for r in job.spec.requests]
    return columns([("ID", "TYPE", "PHASE", "STATE"), *rows])


def _faults(job: ObservedJob, now: datetime) -> list[str]:
    rows = fault_rows(job, now)
    return columns([("EXECUTION", "TIME", "REASON", "POD", "NODE", "THEN"), *rows]) if rows else []


def fault_rows(job: ObservedJob, now: datetime) -> list[tuple[str, ...]]:
    """Return execution, time, reason, pod, node and consequence of each fault in the status."""
    return [
        (str(f.execution), f"{age(f.time, now)} ago", one_line(f.reason), f.pod or NOTHING, f.node or NOTHING, _then(f))
        for f in job.status.faults
    ]


def _then(fault: Fault) -> str:
    return "new pods" if fault.restart_in_place is None else "the same pods"


def _conditions(job: ObservedJob) -> list[str]:
    rows = condition_rows(job)
    return columns([("TYPE", "STATUS", "REASON", "MESSAGE"), *rows]) if rows else []


def condition_rows(job: ObservedJob) -> list[tuple[str, ...]]:
    """Return type, status, reason and message of each condition."""
    return [(c.type, c.status, c.reason, one_line(c.message)) for c in job.status.conditions]


def _events(events: Sequence[Json], now: datetime) -> list[str]:
    rows = event_rows(events, now)
    return columns([("AGE", "TYPE", "REASON", "MESSAGE"), *rows]) if rows else []


def event_rows(events: Sequence[Json], now: datetime) -> list[tuple[str, ...]]:
    """Return age, type, reason and message of the newest events, oldest first."""
    return [
        (age(_time(e), now), e.get("type") or "", e.get("reason") or "", one_line(e.get("message") or ""))
        for e in sorted(events, key=_time)[-_NEWEST_EVENTS:]
    ]


def _time(event: Json) -> str:
    """Return the time of the event's newest occurrence.

    Newer Kubernetes clients write eventTime, older ones lastTimestamp.
    """
    series = event.get("series") or {}
    found = series.get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return str(found or event["metadata"]["creationTimestamp"])
