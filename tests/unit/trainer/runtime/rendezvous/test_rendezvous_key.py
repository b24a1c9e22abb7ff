"""The rendezvous secret of a job, and the error of a pod without one."""

from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.wire.messages import EXIT_CODES
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.runtime.rendezvous.identity import check_secret, rendezvous_key

from tests.support.pods import meeting, start_pod

FILE = "PSEUDOREAL_RENDEZVOUS_SECRET"


@pytest.fixture
def pod(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a pod that joins a rendezvous of two."""
    path = tmp_path / "secret"
    path.write_bytes(bytes(range(32)))
    return {"PET_NNODES": "2", "PET_RDZV_ID": "uid-real-1", FILE: str(path)}


def test_each_rendezvous_and_each_job_has_its_own_key(pod: dict[str, str]) -> None:
    names = ("uid-real-1", "uid-real-2", "uid-real-1-2", "uid-real-1-2-of-2")
    keys = {rendezvous_key(pod | {"PET_RDZV_ID": name}) for name in names}
    Path(pod[FILE]).write_bytes(bytes(32))
    keys.add(rendezvous_key(pod))
    assert len(keys) == 5
    assert {len(key) for key in keys} == {32}
    assert rendezvous_key(pod) == rendezvous_key(pod), "all pods derive the same key"


def test_a_pod_without_a_secret_file_names_the_remedy(pod: dict[str, str]) -> None:
    check_secret(pod)
    del pod[FILE]
    with pytest.raises(
        InvalidJobError, match=r"upgrade the operator to the release of this image, or set spec\.pod\.image"
    ):
        check_secret(pod)
    check_secret(pod | {"PET_NNODES": "1"})
    check_secret({})


def test_an_unusable_secret_is_named(pod: dict[str, str]) -> None:
    Path(pod[FILE]).write_bytes(b"short")
    with pytest.raises(TrainingError, match=r"has 5 bytes, and 32 are needed: .* delete it"):
        check_secret(pod)
    Path(pod[FILE]).unlink()
    with pytest.raises(TrainingError, match=r"cannot be read: .*No such file"):
        check_secret(pod)


def test_a_pod_without_a_secret_ends_before_the_rendezvous(config: Any, tmp_path: Path) -> None:
    phase = config(0).model_copy(update={"workers": 2})
    environment = {name: value for name, value in meeting(1, 1).items() if name != FILE}
    pod = start_pod(phase, tmp_path / "pod", 1, 2, environment=environment)
    assert pod.wait() == EXIT_CODES["InvalidJob"], pod.said()
    assert f"{FILE} names no file" in pod.message()["message"]
