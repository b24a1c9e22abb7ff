"""A job that asked for GPUs trains on GPUs or not at all, and all of its ranks on the same kind of device."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.ranks.ranks import check_devices, device_of_rank, open_ranks
from pseudoreal_trainer.errors import TrainingError
from torch.distributed import HashStore  # type: ignore[attr-defined]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LIMIT = timedelta(seconds=300)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Returns a function that sets the number of GPUs that torch finds."""

    def say(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")

    return say


@pytest.mark.parametrize(("gpus", "ranks", "there"), [(1, 1, 0), (8, 8, 7), (1, 2, 1)])
def test_a_pod_that_requested_gpus_does_not_train_on_the_cpu(
    gpus: int, ranks: int, there: int, found: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before the rank meets the other ranks, which would wait for it in another network."""
    found(there)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it has begun to meet the others"))
    says = rf"asked for {gpus} GPUs and has {ranks} ranks, but torch finds {there} GPUs: look at the driver"
    with pytest.raises(TrainingError, match=says), open_ranks(gpus=gpus):
        pass


def test_a_job_that_requested_no_gpus_uses_the_available_device(
    found: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    found(0)
    assert device_of_rank() == CPU
    found(2)
    assert device_of_rank() == device_of_rank(2) == torch.device("cuda", 1)


IMAGE = ["sm_75", "sm_80", "sm_90", "sm_100"]


@pytest.mark.parametrize(
    ("architectures", "capability", "runs"),
    [
        (IMAGE, (7, 0), False),
        (IMAGE, (7, 5), True),
        (IMAGE, (8, 9), True),
        (IMAGE, (10, 3), True),
        (IMAGE, (12, 0), False),
        ([*IMAGE, "compute_100"], (12, 0), True),
        ([*IMAGE, "compute_120"], (11, 0), False),
        (["sm_90a"], (9, 0), True),
        (["sm_100a"], (10, 3), False),
        (["sm_100f"], (10, 3), True),
        (["sm_100f"], (12, 0), False),
        (["compute_100f"], (12, 0), False),
        # torch for AMD's GPUs, and torch without a list.
        (["gfx942"], (9, 4), True),
        ([], (7, 0), True),
    ],
)
def test_a_gpu_for_which_torch_has_no_code_is_refused_by_name(
    architectures: list[str],
    capability: tuple[int, int],
    runs: bool,
    found: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found(1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: architectures)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-32GB")
    if runs:
        assert device_of_rank(1) == GPU
        return
    known = "7.5, 8.0, 9.0, 10.0" if "sm_80" in architectures else "10.0"
    says = rf"GPU Tesla V100-SXM2-32GB has compute capability {capability[0]}.{capability[1]}, and torch .* for {known}"
    with pytest.raises(TrainingError, match=says):
        device_of_rank(1)


def _check(devices: list[torch.device]) -> list[str]:
    """Return the error message of each rank."""
    store, said = HashStore(), [""] * len(devices)

    def rank(number: int) -> None:
        try:
            check_devices(store, number, len(devices), devices[number], LIMIT)
        except TrainingError as error:
            said[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(devices))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return said


@pytest.mark.parametrize("device", [CPU, GPU])
def test_ranks_with_one_kind_of_device_start(device: torch.device) -> None:
    assert _check([device] * 3) == [""] * 3


def test_every_rank_fails_if_one_rank_has_no_gpu() -> None:
    said = _check([GPU, GPU, CPU, GPU])
    assert len(set(said)) == 1
    assert "and rank 2 has none: ask for GPUs in phases[].resources.limits" in said[0]
