"""Accelerators that pods of a phase request: extended resources, and claims of dynamic resource allocation. Pure."""

import re
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pseudoreal_api.base import Quantity
from pseudoreal_api.names import CONTAINER
from pseudoreal_api.quantity import count_of
from pseudoreal_api.spec.job import PseudoRealJobSpec
from pseudoreal_api.spec.phase import Phase

MOST_ACCELERATORS = 64
"""Maximum number of accelerators of a pod, as of processesPerWorker."""
_NAMES = re.compile(
    r"""
      [a-z0-9.-]+/gpu                             # NVIDIA, AMD and others
    | nvidia\.com/gpu[.-].+                       # shared in time (gpu.shared), or with the name of a model
    | nvidia\.com/mig-.+                          # parts of a GPU
    | amd\.com/[a-z]+_nps[0-9]+                   # parts of a GPU
    | habana\.ai/gaudi
    | gpu\.intel\.com/(i915|xe)                   # not millicores, memory.max, tiles and monitoring
    | huawei\.com/(npu|Ascend[0-9]+[A-Z0-9]*(-[0-9][0-9a-z.]*)?)  # whole and parts; not the memory of a part
    """,
    re.VERBOSE,
)
_QUANTITY: TypeAdapter[int | str] = TypeAdapter(Quantity)

Json = dict[str, Any]


class NotACount(ValueError):
    """The amount of an accelerator is no number of devices; the text names field, value and remedy."""


def is_accelerator(resource: str) -> bool:
    """Return whether a resource name means whole accelerators, or parts that a process uses like a whole one."""
    return _NAMES.fullmatch(resource) is not None


def requested_accelerators(spec: PseudoRealJobSpec, phase: Phase) -> int:
    """Return the number of accelerators that each pod of the phase requests. Raises NotACount.

    How many devices a claim stands for is not in the spec: if the trainer container has claims and no resource with the
    name of an accelerator, processesPerWorker is the number, or one for each claim.
    """
    limits, claims = _requested(spec, phase)
    named = sum(_count(phase, name, amount) for name, amount in limits.items() if is_accelerator(name))
    if named > MOST_ACCELERATORS:
        raise NotACount(
            f"spec.phases[{phase.name}].resources.limits: {named} accelerators in a pod are more than"
            f" {MOST_ACCELERATORS}; take more workers with fewer each"
        )
    return named or (phase.processes_per_worker or min(claims, MOST_ACCELERATORS) if claims else 0)


def _requested(spec: PseudoRealJobSpec, phase: Phase) -> tuple[dict[str, Any], int]:
    """Return limits and number of claims of the trainer container: those of the phase, and over them those of the pod
    templates of the job and the phase."""
    limits: dict[str, Any] = dict(phase.resources.limits)
    claims: set[tuple[str, str]] = set()
    for template in (spec.pod.template, phase.pod.template):
        resources = _resources(template)
        limits |= {name: amount for name, amount in _map(resources.get("limits")).items() if amount is not None}
        claims |= {(str(one.get("name")), str(one.get("request"))) for one in _maps(resources.get("claims"))}
    return limits, len(claims)


def _resources(template: Json) -> Json:
    containers = _maps(_map(template.get("spec")).get("containers"))
    return next((_map(one.get("resources")) for one in containers if one.get("name") == CONTAINER), {})


def _map(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _maps(value: Any) -> list[Json]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _count(phase: Phase, resource: str, amount: Any) -> int:
    where = f"spec.phases[{phase.name}].resources.limits: of {resource}, "
    try:
        return count_of(_QUANTITY.validate_python(amount))
    except ValidationError:
        raise NotACount(f"{where}{str(amount)[:64]!r} is not a quantity; write 1, 2 and so on") from None
    except ValueError as error:
        raise NotACount(f"{where}{error}; write 1, 2 and so on") from error
