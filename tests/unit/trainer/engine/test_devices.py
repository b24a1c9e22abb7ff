"""A job that asked for GPUs trains on GPUs or not at all, and all of its ranks on the same kind of device."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.accelerator.environment import TAKE_FOUND
from pseudoreal_trainer.engine.ranks.ranks import check_devices, device_of_rank, open_ranks
from pseudoreal_trainer.errors import TrainingError
from torch.distributed import HashStore  # type: ignore[attr-defined]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LIMIT = timedelta(seconds=300)


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that sets the number of accelerators that torch finds, and their type."""

    def say(count: int, kind: str = "cuda") -> None:
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")

    return say


@pytest.mark.parametrize(("gpus", "ranks", "there"), [(1, 1, 0), (8, 8, 7), (1, 2, 1)])
def test_a_pod_that_requested_gpus_does_not_train_on_the_cpu(
    gpus: int, ranks: int, there: int, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal comes before the rank meets the other ranks, which would wait for it in another network."""
    found(there)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: pytest.fail("it has begun to meet the others"))
    says = rf"asked for {gpus} GPUs and has {ranks} ranks, but torch finds {there} GPUs: look at the driver"
    with pytest.raises(TrainingError, match=says), open_ranks(gpus=gpus):
        pass


@pytest.mark.parametrize("said", [None, "", "0", "true"])
def test_a_pod_that_requested_no_gpus_never_takes_one(
    said: str | None, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime may show it all GPUs of the node, which other pods have asked for."""
    if said is not None:
        monkeypatch.setenv(TAKE_FOUND, said)
    found(8)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: pytest.fail("it need not ask"))
    assert device_of_rank() == CPU


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_local_run_takes_the_accelerators_of_the_machine_if_there_is_one_for_each_rank(
    kind: str, found: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TAKE_FOUND, "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for count in (0, 1):
        found(count, kind)
        assert device_of_rank() == CPU
    found(2, kind)
    assert device_of_rank() == device_of_rank(2) == torch.device(kind, 1)


def test_apple_s_gpu_is_left_alone(found: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no streams and no collectives."""
    monkeypatch.setenv(TAKE_FOUND, "1")
    found(1, "mps")
    assert device_of_rank() == CPU


def test_a_torch_without_support_of_accelerators_trains_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAKE_FOUND, "1")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    assert device_of_rank() == CPU
    with pytest.raises(TrainingError, match="asked for 1 GPUs and has 1 ranks, but torch finds 0"):
        device_of_rank(1)


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
    found: Callable[..., None],
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


@pytest.mark.parametrize("device", [CPU, GPU, torch.device("xpu", 0)])
def test_ranks_with_one_kind_of_device_start(device: torch.device) -> None:
    assert _check([device] * 3) == [""] * 3


def test_every_rank_fails_if_one_rank_has_no_gpu() -> None:
    said = _check([GPU, GPU, CPU, GPU])
    assert len(set(said)) == 1
    assert "and rank 2 has none: ask for GPUs in phases[].resources.limits" in said[0]
