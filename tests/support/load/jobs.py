"""Valid jobs with any number of workers, for tests and benchmarks that load the operator."""

from typing import Any

from pseudoreal_api.base import GROUP, PLURAL, VERSION

from tests.support.jobs import good_job

Json = dict[str, Any]
RESOURCE = f"{GROUP}/{VERSION}/{PLURAL}"
"""Path of PseudoRealJobs below /apis: group, version, plural."""


def one_phase(name: str, workers: int) -> Json:
    body = good_job(name)
    body["spec"]["phases"] = [_wide(body["spec"]["phases"][1], workers)]
    return body


def two_phases(name: str, workers: int) -> Json:
    body = good_job(name)
    body["spec"]["phases"] = [_wide(phase, workers) for phase in body["spec"]["phases"]]
    return body


def _wide(phase: Json, workers: int) -> Json:
    """Return the phase with this many workers, and enough sequences for them."""
    return phase | {"workers": workers, "batch": {"sequences": 2 * workers, "microBatches": 2}}
