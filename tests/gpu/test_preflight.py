"""The preflight check on GPUs and over NCCL."""

import pytest
import torch
from pseudoreal_trainer.preflight import probes
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.multiprocessing.spawn import spawn

from tests.gpu.conftest import Figure
from tests.support.ports import free_port

pytestmark = pytest.mark.gpu


def test_a_product_is_right_to_the_bit(device: torch.device, figure: Figure) -> None:
    seconds, is_right = probes.product(device)
    figure(f"{1000 * seconds:.2f} ms")
    assert is_right
    assert 0 < seconds < 1


def test_two_ranks_talk_over_nccl() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL gives each rank a GPU of its own, and this machine has only one")
    spawn(_probe_pair, (free_port(),), nprocs=2)


def _probe_pair(place: int, port: int) -> None:
    store = TCPStore("127.0.0.1", port, is_master=place == 0, wait_for_workers=False)
    assert probes.sums(store, place, torch.device("cuda", place), 60.0) > 0
