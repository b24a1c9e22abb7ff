"""Checks beyond the schema: whether a job's phases can run. Pure."""

from collections.abc import Iterator
from math import gcd

from pseudoreal_api.resolved.elastic import check_elastic
from pseudoreal_api.resolved.layers import (
    Sources,
    blocks_of_layers,
    has_cross_stage_weights,
    number_of_blocks,
    sets_of_experts,
)
from pseudoreal_api.resolved.resolve import (
    UnresolvableJob,
    adds_experts,
    adds_layers,
    experts_of,
    explicit_sharing,
    growth_of,
    layers_field,
    layers_of,
    model_of,
    rank_counts,
    state_sharding,
)
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import MOMENT_BLOCK
from pseudoreal_api.spec.phase import Phase

_MOST_PERIOD = 100_000
"""Largest sum of a mixture's weights after division by their greatest common divisor: the trainer keeps a table of one
period in memory."""


def check_resolvable(spec: PseudoRealJobSpec) -> None:
    """Raise UnresolvableJob for the first impossible phase."""
    if float(spec.delink.noise) > 1:
        raise UnresolvableJob(
            f"spec.delink.noise {spec.delink.noise} must be at most 1, with which noise is as large as initial weights;"
            " lower noise"
        )
    _check_blocks(spec)
    for index, phase in enumerate(spec.phases):
        _check_layers(spec, index)
        if phase.experts is not None:
            _check_few_experts(spec, phase)
        _check_added_experts(spec, index)
        if phase.layers is not None:
            _check_shallow(spec, phase)
            _check_origins(spec, index)
        if index > 0 and spec.phases[index - 1].layers is not None:
            _check_sources(spec, index)
        rank_counts(spec, phase)
        check_elastic(spec, index)
        if spec.optimizer.algorithm == "Muon":
            _check_whole_matrices(spec, phase)
        _check_homes(spec, phase)
        _check_mixture(spec, phase)


def _check_blocks(spec: PseudoRealJobSpec) -> None:
    """Raise UnresolvableJob if moments are in blocks that a tensor, or an expert's part of one, does not fill."""
    if spec.optimizer.moments != "Float8":
        return
    for name, size in _vector_sizes(spec.model):
        if size % MOMENT_BLOCK:
            raise UnresolvableJob(
                f"spec.optimizer.moments Float8 stores moments in blocks of {MOMENT_BLOCK} elements, but {name} is"
                f" {size}; make it a multiple of {MOMENT_BLOCK}, or set moments to BFloat16"
            )


def _vector_sizes(model: Model) -> Iterator[tuple[str, int]]:
    """Yield (name, number of elements) of the model's vectors. Each matrix has hiddenSize rows or columns."""
    attention, feed_forward = model.attention, model.feed_forward
    yield "spec.model.hiddenSize", model.hidden_size
    if attention.query_key_norm == "PerHead":
        yield "the size of a head of spec.model.attention", model.head_size
    if attention.query_key_norm == "AllHeads" or attention.bias != "None":
        yield "the size of all query heads of spec.model.attention", model.query_size
        yield "the size of all key heads of spec.model.attention", model.key_size
    if feed_forward.bias == "All":
        if model.experts is None or model.experts.dense_layers:
            yield "spec.model.feedForward.size", feed_forward.size
        if model.experts is not None:
            yield "the size of an expert of spec.model.experts", model.expert.size


def _check_layers(spec: PseudoRealJobSpec, index: int) -> None:
    """Raise UnresolvableJob if the phase has more layers than the model, or than a phase after it."""
    phase, most = spec.phases[index], spec.model.layers
    layers, where = layers_of(spec, phase), f"spec.phases[{phase.name}]"
    if layers > most:
        raise UnresolvableJob(f"{where}.layers {layers} must be at most spec.model.layers {most}; lower it")
    if index == 0:
        if phase.growth is not None:
            raise UnresolvableJob(
                f"{where}.growth: there is no phase before the first phase, so no layers are added; remove growth"
            )
        return
    before = spec.phases[index - 1]
    if layers < layers_of(spec, before):
        raise UnresolvableJob(
            f"{where}.layers {layers} must be at least the {layers_of(spec, before)} layers of phase {before.name},"
            " because a phase cannot remove layers; raise layers, or omit the field"
        )
    if phase.growth is not None and not adds_layers(spec, index):
        raise UnresolvableJob(
            f"{where}.growth needs more layers than phase {before.name} has, but both phases have {layers} layers;"
            f" remove growth, or set fewer layers in phase {before.name}"
        )


def _check_origins(spec: PseudoRealJobSpec, index: int) -> None:
    """Raise UnresolvableJob if blocks of a shallow first phase would begin as layers that it does not have."""
    start, layers = spec.checkpoint.start_from, layers_of(spec, spec.phases[index])
    for layer in start.blocks.layers if start and index == 0 else ():
        if layer >= layers:
            raise UnresolvableJob(
                f"spec.checkpoint.startFrom.blocks.layers: there is no layer {layer}, as"
                f" {layers_field(spec.phases[0])} is {layers} and the first layer is 0"
            )


def _check_few_experts(spec: PseudoRealJobSpec, phase: Phase) -> None:
    """Raise UnresolvableJob if the experts of a phase with `experts` cannot be routed to, or not be cut as the phase
    says."""
    where, experts, count = f"spec.phases[{phase.name}]", spec.model.experts, experts_of(spec, phase)
    if experts is None:
        raise UnresolvableJob(f"{where}.experts is {phase.experts}, but spec.model has no experts; remove experts")
    if count > experts.count:
        raise UnresolvableJob(f"{where}.experts {count} must be at most spec.model.experts.count {experts.count}")
    if experts.prototypes > 1:
        raise UnresolvableJob(
            f"{where}.experts needs spec.model.experts.prototypes 1, but prototypes is {experts.prototypes}: copies of"
            " experts could be in another prototype than their originals; remove experts"
        )
    if experts.top_k and experts.top_k.per_token > count:
        raise UnresolvableJob(
            f"{where}.experts {count} must be at least spec.model.experts.topK.perToken {experts.top_k.per_token};"
            " raise it"
        )
    parts = {
        "parallelism.expertRanks": phase.parallelism.expert_ranks,
        "parallelism.expertRanks times offload.expertGroups": phase.parallelism.expert_ranks
        * phase.offload.expert_groups,
    }
    for field, number in parts.items():
        if count % number:
            raise UnresolvableJob(
                f"{where}.experts {count} must be a multiple of {field}, which is {number}; change one of them"
            )


def _check_added_experts(spec: PseudoRealJobSpec, index: int) -> None:
    """Raise UnresolvableJob if a phase has fewer experts than the phase before, or more that would stay equal."""
    if index == 0:
        return
    before, phase = spec.phases[index - 1 : index + 1]
    had, has = experts_of(spec, before), experts_of(spec, phase)
    if has < had:
        raise UnresolvableJob(
            f"spec.phases[{phase.name}].experts {has} must be at least the {had} experts of phase {before.name},"
            " because a phase cannot remove experts; raise experts, or omit the field"
        )
    if adds_experts(spec, index) and float(spec.delink.noise) == 0:
        raise UnresolvableJob(
            f"spec.delink.noise must be greater than 0, because phase {phase.name} has {has} experts, copied from"
            f" {had} experts of phase {before.name}: without noise, copies get equal gradients and never differ; set"
            " noise to 0.01, for instance"
        )


def _check_shallow(spec: PseudoRealJobSpec, phase: Phase) -> None:
    """Raise UnresolvableJob if the sharing of a phase with `layers` does not fit them. CEL rules check other phases."""
    model, sharing, where = model_of(spec, phase), explicit_sharing(spec, phase), f"spec.phases[{phase.name}]"
    if model.layers % sharing.blocks:
        raise UnresolvableJob(
            f"{where}.sharing.blocks {sharing.blocks} must divide {where}.layers {model.layers}; change one of them"
        )
    dense = model.experts.dense_layers if model.experts else []
    blocks = blocks_of_layers(sharing, model.layers) if dense else ()
    others = {block: layer for layer, block in enumerate(blocks) if layer not in dense}
    for layer in dense:
        if blocks[layer] in others:
            raise UnresolvableJob(
                f"{where}.sharing: layer {layer} of spec.model.experts.denseLayers shares a block with layer"
                f" {others[blocks[layer]]}, but layers with and without experts cannot share a block; change sharing or"
                " denseLayers"
            )
    if phase.until.gradient_correlation is not None and sharing.blocks == model.layers:
        raise UnresolvableJob(
            f"{where}.until.gradientCorrelation compares layers that share a block, but the phase has {sharing.blocks}"
            f" blocks for {where}.layers {model.layers}; remove gradientCorrelation, or lower sharing.blocks"
        )


def _check_sources(spec: PseudoRealJobSpec, index: int) -> None:
    """Raise UnresolvableJob if layers share weights, but would begin as layers with different ones."""
    phases = spec.phases[index - 1 : index + 1]
    before, after = ((model_of(spec, phase), explicit_sharing(spec, phase)) for phase in phases)
    growth, where = growth_of(phases[1]), f"spec.phases[{phases[1].name}]"
    try:
        Sources.of(growth, before, after)
    except ValueError as error:
        if not adds_layers(spec, index):
            raise UnresolvableJob(f"{where}.sharing: {error}; change sharing") from None
        raise UnresolvableJob(
            f"{where}.growth with pattern {growth.pattern}, from {before[0].layers} to {after[0].layers} layers:"
            f" {error}; change growth, sharing or layers"
        ) from None


def _check_whole_matrices(spec: PseudoRealJobSpec, phase: Phase) -> None:
    """Raise UnresolvableJob if the state of blocks or experts is cut over ranks, with all workers or, in an elastic
    phase, with fewer."""
    asked, ranks = phase.parallelism, rank_counts(spec, phase)
    model, sharing = model_of(spec, phase), explicit_sharing(spec, phase)
    shares = sharing.blocks < model.layers
    where = f"spec.phases[{phase.name}].parallelism"
    if asked.layout == "Auto":
        number, sequences = ranks.workers * ranks.processes_per_worker, phase.batch.sequences
        if shares and number > sequences:
            raise UnresolvableJob(
                f"{where}.layout Auto: with {number} ranks for the {sequences} sequences of a step, there are several"
                " pipeline ranks, which may cut weights that layers share, but spec.optimizer.algorithm Muon needs"
                f" whole matrices; raise batch.sequences to {number}, lower workers, or set algorithm AdamW"
            )
        return
    if shares and phase.elastic is not None and asked.pipeline == "AllRanks":
        raise UnresolvableJob(
            f"{where}.pipeline AllRanks changes the number of pipeline ranks with the workers of an elastic phase, and"
            " several pipeline ranks may cut weights that layers share, but spec.optimizer.algorithm Muon needs whole"
            " matrices; set pipeline 1, remove elastic, or set algorithm AdamW"
        )
    if state_sharding(spec, phase, ranks) != "None" and ranks.data_ranks > 1:
        raise UnresolvableJob(
            f"{where}.stateSharding {asked.state_sharding} cuts matrices over {ranks.data_ranks} data-parallel ranks,"
            " but spec.optimizer.algorithm Muon needs whole matrices; set stateSharding None, or algorithm AdamW"
        )
    if model.layers % sharing.blocks == 0 and has_cross_stage_weights(model, sharing, ranks.pipeline, asked.schedule):
        raise UnresolvableJob(
            f"{where}.pipeline {asked.pipeline} puts layers with shared weights on several pipeline ranks, which cut"
            " the state of these weights, but spec.optimizer.algorithm Muon needs whole matrices; set pipeline 1, or"
            " algorithm AdamW"
        )


def _check_homes(spec: PseudoRealJobSpec, phase: Phase) -> None:
    sharing = explicit_sharing(spec, phase)
    model = model_of(spec, phase)
    blocks, experts = number_of_blocks(sharing, model.layers), sets_of_experts(sharing, model)
    for unit in (home.unit for home in phase.offload.homes):
        if unit.endswith(".experts"):
            if int(unit.removeprefix("blocks.").removesuffix(".experts")) not in experts:
                raise UnresolvableJob(
                    f"spec.phases[{phase.name}].offload.homes: there is no {unit}; the phase has"
                    f" {', '.join(f'blocks.{number}.experts' for number in experts) or 'no experts'}"
                )
        elif unit.startswith("blocks.") and int(unit.removeprefix("blocks.")) >= blocks:
            raise UnresolvableJob(
                f"spec.phases[{phase.name}].offload.homes: there is no {unit}, as the phase has {blocks} blocks;"
                f" the last is blocks.{blocks - 1}"
            )
        if unit == "head" and spec.model.embeddings == "Tied":
            raise UnresolvableJob(
                f"spec.phases[{phase.name}].offload.homes: there is no unit head, because spec.model.embeddings is"
                " Tied; name the unit embedding, which contains the head"
            )


def _check_mixture(spec: PseudoRealJobSpec, phase: Phase) -> None:
    names = [source.name for source in spec.data.sources]
    for part in phase.mixture:
        if part.source not in names:
            raise UnresolvableJob(
                f"spec.phases[{phase.name}].mixture: there is no source {part.source} in spec.data.sources, which has"
                f" {', '.join(names) or 'none'}"
            )
    weights = [part.weight for part in phase.mixture] or [source.weight for source in spec.data.sources]
    if weights and sum(weights) // gcd(*weights) > _MOST_PERIOD:
        raise UnresolvableJob(
            f"spec.phases[{phase.name}]: the weights of the sources, divided by their greatest common divisor, add up"
            f" to {sum(weights) // gcd(*weights)}, but the sum must be at most {_MOST_PERIOD}; use smaller weights"
        )
