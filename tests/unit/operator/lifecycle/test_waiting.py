"""Obstacles that keep pods from running, if the job itself is part of the cause."""

from typing import Any

import pytest

from tests.unit.operator.lifecycle.support.steps import claims, message
from tests.unit.operator.support.world import World, make_job

UNBOUND = "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims. preemption: not helpful"
LATE = 'running PreBind plugin "VolumeBinding": binding volumes: context deadline exceeded'


def waits(said: str, **changes: Any) -> World:
    """Return a world in which the first pods of a job wait with this message of the scheduler."""
    world = World(make_job(spec__checkpoint=changes.pop("checkpoint", {}), **changes))
    world.settle()
    world.control()
    for pod in world.alive():
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": said}
        pod["status"]["conditions"] = [condition]
    world.settle()
    assert claims(world)["Progressing"] == ("False", "Unschedulable")
    return world


@pytest.mark.parametrize("said", [UNBOUND, LATE])
def test_a_claim_that_its_class_cannot_serve_is_named_with_the_line_to_change(said: str) -> None:
    told = message(waits(said), "Progressing")
    assert "Claim sim-checkpoints asks for ReadWriteMany" in told
    assert "its class is the cluster's default" in told
    assert "spec.checkpoint.storage.volume.claimTemplate.spec.storageClassName" in told
    named = {"storage": {"volume": {"claimTemplate": {"spec": {"storageClassName": "gp3"}}}}}
    assert "its class is gp3." in message(waits(said, checkpoint=named), "Progressing")


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu", {}),
        (UNBOUND, {"checkpoint": {"storage": {"volume": {"claimName": "mine"}}}}),
        (UNBOUND, {"spec__phases__1__workers": 1}),
    ],
)
def test_of_other_troubles_nothing_is_said_of_it(said: str, changes: dict[str, Any]) -> None:
    assert "ReadWriteMany" not in message(waits(said, **changes), "Progressing")
