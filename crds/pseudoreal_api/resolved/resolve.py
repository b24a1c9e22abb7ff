"""Resolves a job's spec into the configuration of each phase, with checks beyond the schema. Pure."""

from dataclasses import dataclass
from math import ceil, gcd
from typing import TypedDict

from pseudoreal_api.names import work_directory as folder_of_job
from pseudoreal_api.resolved.accelerators import NotACount, requested_accelerators
from pseudoreal_api.resolved.config import (
    CheckpointPolicy,
    DelinkConfig,
    DiscardConfig,
    JobIdentity,
    MeasureConfig,
    PhaseConfig,
    PhaseMixture,
    ResolvedParallelism,
)
from pseudoreal_api.resolved.layers import first_layers, number_of_blocks, sets_of_experts
from pseudoreal_api.resolved.sequences import most_context_ranks, obstacle_to_tensor_ranks
from pseudoreal_api.spec.checkpoint import Checkpoint
from pseudoreal_api.spec.job import PseudoRealJob, PseudoRealJobSpec
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Growth, Phase, Sharing, StateSharding
from pseudoreal_api.spec.recovery import Hang

_AFTER_THE_CLOCKS = 300
"""Seconds that the operator has to end an execution after a time limit of spec.hang, before ranks end by themselves."""


class UnresolvableJob(ValueError):
    """The schema accepts the job, but the job cannot run; the text names the necessary change."""


@dataclass(frozen=True)
class RankCounts:
    """Numbers of workers and ranks of a phase."""

    workers: int
    processes_per_worker: int
    pipeline: int

    @property
    def ranks(self) -> int:
        return self.workers * self.processes_per_worker

    @property
    def data_ranks(self) -> int:
        return self.ranks // self.pipeline


class _Stage(TypedDict):
    """Configuration fields common to all stages."""

    job: JobIdentity
    execution: int
    work_directory: str
    object_storage: str | None
    discards: dict[str, list[DiscardConfig]] | None


class _Course(TypedDict):
    """Fields of a phase's configuration that depend on the phases before and after."""

    index: int
    phase_steps: int
    total_steps: int
    warmup_steps: int
    measure: MeasureConfig | None
    mixtures: list[PhaseMixture]


class _Processes(TypedDict):
    """Processes of a phase, and their resources."""

    workers: int
    processes_per_worker: int
    gpus: int
    parallelism: ResolvedParallelism


def phase_config(
    job: PseudoRealJob,
    index: int,
    *,
    execution: int,
    work_directory: str,
    offload_directory: str,
    discards: dict[str, list[DiscardConfig]] | None = None,
    in_place: int = 0,
) -> PhaseConfig:
    """Return the configuration of the phase at `index`. Raises UnresolvableJob.

    `in_place`: number of times that the pods of the phase may restart their ranks in place.
    """
    spec, phase = job.spec, job.spec.phases[index]
    return PhaseConfig(
        **_stage(job, execution, work_directory, discards),
        **_course(spec, index),
        **_processes(spec, phase),
        phase=phase.name,
        model=model_of(spec, phase),
        data=spec.data,
        optimizer=spec.optimizer,
        precision=spec.precision,
        sharing=explicit_sharing(spec, phase),
        until=phase.until,
        collective_seconds=collective_seconds(spec.hang),
        batch=phase.batch,
        activations=phase.activations,
        offload=phase.offload,
        compile=phase.compile,
        offload_directory=offload_directory,
        preflight=spec.network.preflight,
        checkpoint=_checkpoint_policy(spec.checkpoint),
        logging=spec.logging,
        in_place=in_place,
        spares=phase.spares,
        continues=_continued(job, work_directory),
        noise=spec.delink.noise if index > 0 and float(spec.delink.noise) else None,
        start_from=spec.checkpoint.start_from if index == 0 else None,
    )


def _stage(
    job: PseudoRealJob, execution: int, work_directory: str, discards: dict[str, list[DiscardConfig]] | None
) -> _Stage:
    return {
        "job": JobIdentity(name=job.metadata.name, namespace=job.metadata.namespace, uid=job.metadata.uid),
        "execution": execution,
        "work_directory": work_directory,
        "object_storage": object_storage(job),
        "discards": discards,
    }


def _course(spec: PseudoRealJobSpec, index: int) -> _Course:
    ends = last_steps(spec)
    return {
        "index": index,
        "phase_steps": ends[index],
        "total_steps": ends[-1],
        "warmup_steps": spec.delink.warmup_steps if index > 0 and _delinks(spec, index) else 0,
        "measure": _measure(spec, index),
        "mixtures": _mixtures(spec, index),
    }


def _processes(spec: PseudoRealJobSpec, phase: Phase) -> _Processes:
    ranks, asked = rank_counts(spec, phase), phase.parallelism
    return {
        "workers": ranks.workers,
        "processes_per_worker": ranks.processes_per_worker,
        "gpus": accelerators_of(spec, phase),
        "parallelism": ResolvedParallelism(
            pipeline=ranks.pipeline,
            schedule=asked.schedule,
            state_sharding=state_sharding(spec, phase, ranks),
            replicas=asked.replicas,
            expert_ranks=asked.expert_ranks,
            context_ranks=asked.context_ranks,
            tensor_ranks=asked.tensor_ranks,
            layout=asked.layout,
            hardware=asked.hardware,
        ),
    }


def collective_seconds(hang: Hang) -> int:
    """Return the seconds after which a rank aborts a collective.

    The limit exceeds every wait that `hang` allows, including a checkpoint between two steps. So the operator, which
    knows the state of each rank, ends a hang first. The limit takes effect without an operator.
    """
    return max(hang.start_seconds, hang.step_seconds + hang.checkpoint_seconds) + _AFTER_THE_CLOCKS


def _continued(job: PseudoRealJob, work_directory: str) -> str | None:
    """Return the folder of the continued job, beside the job's own folder; None if this job continues none."""
    folder = job.spec.checkpoint.continue_from
    return None if folder is None else f"{(object_storage(job) or work_directory).rpartition('/')[0]}/{folder}"


def _measure(spec: PseudoRealJobSpec, index: int) -> MeasureConfig | None:
    """Return the measurement of the phase; None before a growth, whose moments are divided as with Scale."""
    if spec.delink.optimizer_state != "Measured" or index + 1 == len(spec.phases) or grows(spec, index + 1):
        return None
    after = explicit_sharing(spec, spec.phases[index + 1])
    return MeasureConfig(steps=spec.delink.measured_steps, next_sharing=after) if _delinks(spec, index + 1) else None


def _mixtures(spec: PseudoRealJobSpec, index: int) -> list[PhaseMixture]:
    if not spec.data.sources:
        return []
    usual = {source.name: source.weight for source in spec.data.sources}
    return [
        PhaseMixture(
            weights={part.source: part.weight for part in phase.mixture} or usual,
            last_step=last_step,
            sequences=phase.batch.sequences,
        )
        for phase, last_step in [*zip(spec.phases, last_steps(spec), strict=True)][index:]
    ]


def _delinks(spec: PseudoRealJobSpec, index: int) -> bool:
    """Return whether the phase at `index` >= 1 grows, or has other numbers of blocks or sets of experts than the phase
    before."""
    before, after = (_owners(spec, phase) for phase in spec.phases[index - 1 : index + 1])
    return before != after


def _owners(spec: PseudoRealJobSpec, phase: Phase) -> tuple[int, ...]:
    """Return the numbers of layers, of blocks, of sets of experts, and of experts of a set."""
    sharing, model = explicit_sharing(spec, phase), model_of(spec, phase)
    blocks, sets = number_of_blocks(sharing, model.layers), len(sets_of_experts(sharing, model))
    return model.layers, blocks, sets, experts_of(spec, phase)


def layers_of(spec: PseudoRealJobSpec, phase: Phase) -> int:
    return phase.layers or spec.model.layers


def experts_of(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Return the number of experts of a layer; 0 for a model without experts."""
    return (phase.experts or spec.model.experts.count) if spec.model.experts else 0


def layers_field(phase: Phase) -> str:
    """Return the name of the field that the phase's number of layers is from."""
    return "spec.model.layers" if phase.layers is None else f"spec.phases[{phase.name}].layers"


def adds_layers(spec: PseudoRealJobSpec, index: int) -> bool:
    """Return whether the phase at `index` has more layers than the phase before."""
    return index > 0 and layers_of(spec, spec.phases[index - 1]) < layers_of(spec, spec.phases[index])


def adds_experts(spec: PseudoRealJobSpec, index: int) -> bool:
    """Return whether layers of the phase at `index` have more experts than in the phase before."""
    return index > 0 and experts_of(spec, spec.phases[index - 1]) < experts_of(spec, spec.phases[index])


def grows(spec: PseudoRealJobSpec, index: int) -> bool:
    """Return whether the phase at `index` has more layers, or more experts, than the phase before."""
    return adds_layers(spec, index) or adds_experts(spec, index)


def growth_of(phase: Phase) -> Growth:
    return phase.growth or Growth()


def growth_text(spec: PseudoRealJobSpec, index: int) -> str | None:
    """Return a phrase such as "grown from 4 to 12 layers (Stack)"; None if the phase at `index` does not grow."""
    if not grows(spec, index):
        return None
    before, phase = spec.phases[index - 1 : index + 1]
    parts = []
    if adds_layers(spec, index):
        parts.append(f"from {layers_of(spec, before)} to {layers_of(spec, phase)} layers ({growth_of(phase).pattern})")
    if adds_experts(spec, index):
        parts.append(f"from {experts_of(spec, before)} to {experts_of(spec, phase)} experts")
    return f"grown {' and '.join(parts)}"


def model_of(spec: PseudoRealJobSpec, phase: Phase) -> Model:
    """Return the model that the phase trains: spec.model with the phase's layers and experts."""
    return first_layers(spec.model, layers_of(spec, phase), experts_of(spec, phase))


def _checkpoint_policy(checkpoint: Checkpoint) -> CheckpointPolicy:
    return CheckpointPolicy(
        every_steps=checkpoint.every_steps,
        mode=checkpoint.mode,
        buffer_bytes=checkpoint.buffer_bytes,
        keep_last=checkpoint.keep_last,
        keep_every=checkpoint.keep_every,
    )


def delink_config(
    job: PseudoRealJob,
    index: int,
    *,
    execution: int,
    work_directory: str,
    discards: dict[str, list[DiscardConfig]] | None = None,
) -> DelinkConfig:
    """Return the configuration of the delink into the phase at `index` >= 1."""
    before, after = job.spec.phases[index - 1], job.spec.phases[index]
    is_growth = grows(job.spec, index)
    return DelinkConfig(
        **_stage(job, execution, work_directory, discards),
        phase=after.name,
        index=index,
        from_phase=before.name,
        to_sharing=explicit_sharing(job.spec, after),
        to_model=model_of(job.spec, after) if is_growth else None,
        growth=growth_of(after) if is_growth else None,
        optimizer_state=job.spec.delink.optimizer_state,
    )


def object_storage(job: PseudoRealJob) -> str | None:
    """Return the URL in object storage of the job's folder; None if its checkpoints are in its work directory."""
    objects = job.spec.checkpoint.storage.object_storage
    return folder_of_job(objects.url, job.metadata.name, job.metadata.uid) if objects else None


def explicit_sharing(spec: PseudoRealJobSpec, phase: Phase) -> Sharing:
    return phase.sharing or Sharing(blocks=layers_of(spec, phase), pattern="Cycle")


def rank_counts(spec: PseudoRealJobSpec, phase: Phase) -> RankCounts:
    """Return the rank counts of the phase. Raises UnresolvableJob if they fit neither the layers nor the batch.

    With layout Auto, the number of pipeline ranks is still to be chosen and is given as 1.
    """
    processes = phase.processes_per_worker or accelerators_of(spec, phase) or 1
    ranks = phase.workers * processes
    where = f"spec.phases[{phase.name}]"
    counted = f"workers {phase.workers} x {processes} processes per worker = {ranks} ranks"
    _check_norm_before_experts(spec, phase, where)
    _check_tensor_ranks(spec, phase, where)
    if phase.parallelism.layout == "Auto":
        _check_some_layout(spec, phase, ranks, where)
        return RankCounts(phase.workers, processes, 1)
    asked = phase.parallelism.pipeline
    pipeline, layers = ranks if asked == "AllRanks" else asked, layers_of(spec, phase)
    if pipeline > layers and asked == "AllRanks":
        raise UnresolvableJob(
            f"{where}.parallelism.pipeline AllRanks means one stage for each rank, and {counted}, more than"
            f" {layers_field(phase)} {layers}; lower workers or processesPerWorker, or set pipeline"
        )
    if pipeline > layers:
        raise UnresolvableJob(f"{where}.parallelism.pipeline {pipeline} must be at most {layers_field(phase)} {layers}")
    if ranks % pipeline:
        raise UnresolvableJob(
            f"{where}: {counted}, not a multiple of parallelism.pipeline {pipeline}; change one of them"
        )
    data, width = ranks // pipeline, phase.batch.sequences // phase.batch.micro_batches
    if data % phase.parallelism.replicas:
        raise UnresolvableJob(
            f"{where}: {counted} and parallelism.pipeline {pipeline} give {data} data-parallel ranks, not a multiple of"
            f" parallelism.replicas {phase.parallelism.replicas}; change one of them"
        )
    _check_spread(phase, data, where)
    if (groups := data // sequence_ranks(phase)) > width:
        each = "" if groups == data else f" in {groups} groups, one for each sequence"
        raise UnresolvableJob(
            f"{where}: {counted} and parallelism.pipeline {pipeline} give {data} data-parallel ranks{each}, but a"
            f" micro-batch has {width} sequences; raise batch.sequences or lower batch.microBatches or workers"
        )
    _check_order_of_choices(spec, phase, where)
    if phase.parallelism.schedule == "Interleaved":
        try:
            check_interleaved(layers, pipeline, phase.batch.micro_batches)
        except UnresolvableJob as error:
            raise UnresolvableJob(f"{where}: {error}") from None
    return RankCounts(phase.workers, processes, pipeline)


def state_sharding(spec: PseudoRealJobSpec, phase: Phase, ranks: RankCounts) -> StateSharding:
    """Return the phase's stateSharding, filled if the job omits it.

    An elastic phase with too few workers for two data ranks has nothing to split. Muon needs whole matrices. With
    layout Auto the trainer chooses; until then nothing counts as split, which is the largest state that a rank may
    have.
    """
    asked = phase.parallelism
    if asked.state_sharding is not None:
        return asked.state_sharding
    splits = ranks.data_ranks > 1 and asked.layout == "Given" and spec.optimizer.algorithm != "Muon"
    return "Full" if splits else "None"


def _check_some_layout(spec: PseudoRealJobSpec, phase: Phase, ranks: int, where: str) -> None:
    """Raise UnresolvableJob if there is no layout to choose from."""
    layers = layers_of(spec, phase)
    if not has_some_layout(spec, phase, ranks):
        undivided = ranks // gcd(ranks, most_context_ranks(spec.model))
        groups = min(each for each in divisors(undivided) if undivided <= each * layers)
        raise UnresolvableJob(
            f"{where}.parallelism.layout Auto: {ranks} ranks are at least {groups} groups of data-parallel ranks with"
            f" sequences of their own for {layers_field(phase)} {layers}, but a step has {phase.batch.sequences}"
            " sequences; raise batch.sequences or lower workers"
        )


def has_some_layout(spec: PseudoRealJobSpec, phase: Phase, ranks: int) -> bool:
    """Return whether `ranks` ranks can be laid out: some number of pipeline ranks leaves each data-parallel rank a
    sequence, or a part of one.

    It suffices to look at the largest number of context ranks that divides the ranks: if a layout has fewer of them,
    the missing factor divides the product of its pipeline ranks and its groups of data-parallel ranks, and can be taken
    out of these numbers.
    """
    layers, sequences = layers_of(spec, phase), phase.batch.sequences
    groups = ranks // gcd(ranks, most_context_ranks(spec.model))  # if there are no pipeline ranks
    if groups <= max(layers, sequences) or groups > layers * sequences:
        return groups <= max(layers, sequences)
    return any(groups <= each * layers and each <= sequences for each in divisors(groups))


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending. An elastic phase needs the divisors of thousands of products
    of small numbers; small prime factors are found in few steps."""
    found, rest, factor = [1], number, 2
    while rest > 1:
        if factor * factor > rest:
            factor = rest
        power, before = 1, found
        while rest % factor == 0:
            rest, power = rest // factor, power * factor
            found = [*found, *(each * power for each in before)]
        factor += 1
    return sorted(found)


def _check_spread(phase: Phase, data: int, where: str) -> None:
    """Raise UnresolvableJob if a layer's experts, or sequences, cannot be distributed over the ranks."""
    asked, of_replica = phase.parallelism, data // phase.parallelism.replicas
    for field, ranks in {
        "expertRanks": asked.expert_ranks,
        "contextRanks": asked.context_ranks,
        "tensorRanks": asked.tensor_ranks,
    }.items():
        if of_replica % ranks:
            raise UnresolvableJob(
                f"{where}: a replica has {of_replica} data-parallel ranks, not a multiple of parallelism.{field}"
                f" {ranks}; change workers, parallelism.replicas or {field}"
            )
    if of_replica % sequence_ranks(phase):
        raise UnresolvableJob(
            f"{where}: parallelism.contextRanks {asked.context_ranks} times tensorRanks {asked.tensor_ranks} ranks"
            f" share each sequence, and a replica has {of_replica} data-parallel ranks, not a multiple of them; change"
            " workers, parallelism.replicas, contextRanks or tensorRanks"
        )


def sequence_ranks(phase: Phase) -> int:
    """Return the number of ranks that divide the tokens of each sequence among them."""
    return phase.parallelism.context_ranks * phase.parallelism.tensor_ranks


def _check_tensor_ranks(spec: PseudoRealJobSpec, phase: Phase, where: str) -> None:
    """Raise UnresolvableJob if the matrices of layers cannot be cut over the tensor ranks, or if another field needs
    whole matrices or whole sequences."""
    asked = phase.parallelism
    if asked.tensor_ranks == 1:
        return
    index = next(index for index, each in enumerate(spec.phases) if each.name == phase.name)
    measures = phase.until.gradient_correlation is not None or _measure(spec, index) is not None
    reason = obstacle_to_tensor_ranks(
        spec.model,
        spec.optimizer,
        spec.precision,
        asked.tensor_ranks,
        context_ranks=asked.context_ranks,
        sequence_chunks=phase.activations.sequence_chunks,
        measures=measures,
    )
    if reason is not None:
        raise UnresolvableJob(f"{where}.parallelism.tensorRanks {asked.tensor_ranks} {reason}")


def _check_norm_before_experts(spec: PseudoRealJobSpec, phase: Phase, where: str) -> None:
    """Raise UnresolvableJob for a post-norm after experts computed in several parts (ranks or groups)."""
    fields = {
        "parallelism.expertRanks": phase.parallelism.expert_ranks,
        "offload.expertGroups": phase.offload.expert_groups,
    }
    for field, number in fields.items():
        if number > 1 and spec.model.norm.placement != "Pre":
            raise UnresolvableJob(
                f"{where}.{field} {number} needs spec.model.norm.placement Pre, and it is"
                f" {spec.model.norm.placement}: a norm after the experts would need their outputs again in the backward"
                f" pass; remove {field.rpartition('.')[2]}"
            )


def _check_order_of_choices(spec: PseudoRealJobSpec, phase: Phase, where: str) -> None:
    """Raise UnresolvableJob if a loss over all routing decisions of a step would need them before they are made.

    The job's CEL rules check this for the micro-batches with all workers; an elastic phase has more micro-batches with
    fewer workers.
    """
    schedule, number = phase.parallelism.schedule, phase.batch.micro_batches
    if not knows_choices_in_time(spec, phase, number):
        raise UnresolvableJob(
            f"{where}.parallelism.schedule {schedule} starts backward passes of a layer before all {number}"
            " micro-batches are routed to experts, but spec.model.experts.topK.balanceOver Step needs the routing of"
            " the whole step; set schedule Layered or GPipe"
        )


def knows_choices_in_time(spec: PseudoRealJobSpec, phase: Phase, micro_batches: int) -> bool:
    """Return whether all micro-batches pass a layer's router before any backward pass of the layer. True if no loss
    needs this order."""
    in_order = phase.parallelism.schedule in ("Layered", "GPipe")
    return not spec.model.balances_steps or micro_batches == 1 or in_order


def last_steps(spec: PseudoRealJobSpec) -> list[int]:
    """Return the last possible step of each phase, counted from the start of the job."""
    ends: list[int] = []
    step = tokens = 0
    for phase in spec.phases:
        per_step = phase.batch.sequences * spec.model.sequence_length
        bounds = []
        if phase.until.step is not None:
            bounds.append(phase.until.step)
        if phase.until.tokens is not None:
            bounds.append(step + ceil(max(0, phase.until.tokens - tokens) / per_step))
        end = max(step, min(bounds))
        tokens += (end - step) * per_step
        step = end
        ends.append(end)
    return ends


def check_interleaved(layers: int, pipeline: int, micro_batches: int) -> None:
    """Raise UnresolvableJob if torch's ScheduleInterleaved1F1B, which defines the order of this schedule, rejects the
    numbers."""
    if layers % pipeline:
        raise UnresolvableJob(
            f"the schedule Interleaved on {pipeline} pipeline ranks needs a number of layers that is a multiple of"
            f" {pipeline}, but the phase has {layers} layers; set parallelism.pipeline to a divisor of {layers}"
        )
    rounds = max(1, micro_batches // pipeline)
    if micro_batches % rounds:
        raise UnresolvableJob(
            f"the schedule Interleaved on {pipeline} pipeline ranks takes micro-batches in {rounds} equal rounds, but"
            f" batch.microBatches is {micro_batches}; set it to a multiple of {pipeline}, or below {2 * pipeline}"
        )


def has_equal_rounds(spec: PseudoRealJobSpec, phase: Phase, pipeline: int, micro_batches: int) -> bool:
    """Return whether the schedule accepts this number of micro-batches on `pipeline` pipeline ranks; see
    `check_interleaved`."""
    if phase.parallelism.schedule != "Interleaved" or phase.parallelism.layout == "Auto":
        return True
    return layers_of(spec, phase) % pipeline == 0 and micro_batches % max(1, micro_batches // pipeline) == 0


def accelerators_of(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Return the number of accelerators that each pod requests. Raises UnresolvableJob if an amount is no number of
    devices."""
    try:
        return requested_accelerators(spec, phase)
    except NotACount as error:
        raise UnresolvableJob(str(error)) from error
