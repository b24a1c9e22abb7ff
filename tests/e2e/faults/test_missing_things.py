"""A full volume, a missing image: the job reports the cause, and goes on once it is removed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pseudoreal_dev.cluster import cluster
from pseudoreal_dev.cluster.kubectl import Kubernetes
from pseudoreal_dev.machine import mounts, shell

from tests.e2e.faults.support.undisturbed import Undisturbed
from tests.e2e.support.job import IN_NAMESPACE, Job
from tests.e2e.support.machine import make_volume
from tests.support.patience import wait_for

pytestmark = pytest.mark.e2e

CLAIM = "small"


@pytest.fixture
def small_volume(kubernetes: Kubernetes) -> Iterator[Path]:
    """A volume with room for the checkpoints of the pseudo phase, but not of the real phase."""
    folder = make_volume(kubernetes, CLAIM)
    shell.output(["mount", "-t", "tmpfs", "-o", "size=6m,mode=777", "tmpfs", folder])
    yield folder
    kubernetes.run("delete", "persistentvolumeclaim", CLAIM, IN_NAMESPACE)
    kubernetes.run("delete", "persistentvolume", CLAIM)
    mounts.unmount_below(folder.parent)


@pytest.mark.long
def test_a_full_volume_is_said_and_training_goes_on_once_there_is_room(
    small_volume: Path, start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    restart = {"backoffSeconds": 1, "maxRestarts": 100}
    job = start("cramped", claim=CLAIM, spec__restart=restart)
    job.wait("a lack of room", lambda status: status.restarts > 0)
    wait_for("the event", lambda: "ExecutionFailed" in job.reasons())
    told = next(event["message"] for event in job.events() if event["reason"] == "ExecutionFailed")
    assert "No space left on device" in told
    assert "checkpoint.keepLast" in told
    shell.output(["mount", "-o", "remount,size=256m", small_volume])
    status = job.wait_for_end()
    undisturbed.check(job, *["ExecutionFailed", "RestartStarted"] * status.restarts)


@pytest.mark.long
def test_a_missing_image_is_said_and_the_job_starts_once_it_is_there(
    start: Callable[..., Job], undisturbed: Undisturbed
) -> None:
    image = "localhost/pseudoreal-missing:1"
    job = start("unpulled", spec__pod={"image": image, "terminationGracePeriodSeconds": 20})
    job.wait("a missing image", lambda _: job.condition("Progressing").reason in ("ErrImagePull", "ImagePullBackOff"))
    told = job.condition("Progressing").message
    assert image in told
    assert "correct spec.pod.image in a new job" in told
    with _tagged(image):
        undisturbed.check(job)
    assert job.status().restarts == 0


@contextmanager
def _tagged(name: str) -> Iterator[None]:
    """Tag the trainer's image with one more name."""
    containerd = cluster.containerd()
    trainer = next(tag for tag in containerd.image_targets() if tag.startswith("localhost/pseudoreal-trainer:"))
    shell.output(containerd.client("images", "tag", trainer, name))
    try:
        yield
    finally:
        containerd.remove_images([name])
