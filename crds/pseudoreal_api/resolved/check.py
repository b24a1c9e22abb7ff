"""Checks beyond the schema: whether a job's phases can run. Pure."""

from math import gcd

from pseudoreal_api.resolved.elastic import check_elastic
from pseudoreal_api.resolved.layers import number_of_blocks, sets_of_experts
from pseudoreal_api.resolved.resolve import UnresolvableJob, explicit_sharing, rank_counts
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase

_MOST_PERIOD = 100_000
"""Largest sum of a mixture's weights after division by their greatest common divisor: the trainer keeps a table of one
period in memory."""


def check_resolvable(spec: PseudoRealJobSpec) -> None:
    """Raise UnresolvableJob for the first impossible phase."""
    for index, phase in enumerate(spec.phases):
        rank_counts(spec, phase)
        check_elastic(spec, index)
        _check_homes(spec, phase)
        _check_mixture(spec, phase)


def _check_homes(spec: PseudoRealJobSpec, phase: Phase) -> None:
    sharing = explicit_sharing(spec, phase)
    blocks, experts = number_of_blocks(sharing, spec.model.layers), sets_of_experts(sharing, spec.model)
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
                f"spec.phases[{phase.name}].offload.homes: there is no head, as spec.model.embeddings is Tied: name"
                " embedding, which the head is a part of"
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
            f"spec.phases[{phase.name}]: the weights of its sources, without their common divisor, add up to"
            f" {sum(weights) // gcd(*weights)}, and may add up to {_MOST_PERIOD}; use smaller numbers"
        )
