"""A mixture of experts on the cluster: experts shared in the pseudo phase, expert-parallel over two pods in the real
phase."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.faults.support.undisturbed import REAL, SPEC, Undisturbed
from tests.e2e.support import machine
from tests.e2e.support.job import Job
from tests.e2e.support.machine import RANK

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MIXTURE: dict[str, Any] = {
    "spec__model__experts": {"count": 8, "prototypes": 2, "capacityFactor": "1.25"},
    "spec__phases__0__sharing": {"blocks": 1, "parts": ["Experts"]},
    "spec__phases__1__parallelism": {"expertRanks": 2},
}


def test_experts_over_two_pods_survive_a_rank_that_is_killed(start: Callable[..., Job]) -> None:
    """The final weights equal those of an undisturbed job to the bit."""
    undisturbed = Undisturbed.of(start("experts", **MIXTURE))
    job = start("experts-killed", **MIXTURE, spec__restart=SPEC["spec__restart"])
    victim = job.wait_for_steps("real", REAL + 5)[1]
    machine.tell(victim, signal.SIGKILL, RANK)
    status = job.wait_for_end()
    assert status.state == "Complete", status
    assert job.final_files() == undisturbed.files, "the weights differ"
    assert status.progress is not None
    assert status.progress.experts is not None, "the load of experts is reported"
    real = next(manifest for manifest in reversed(job.manifests()) if manifest["phase"] == "real")
    pieces = {piece["file"] for name, t in real["tensors"].items() if ".experts." in name for piece in t["pieces"]}
    assert pieces == {0, 1}, "each pod writes its own experts"
