import pytest
import torch


def pytest_runtest_setup() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU that it can use on this machine, so nothing of CUDA was run")


@pytest.fixture
def gpu() -> torch.device:
    """The first one."""
    return torch.device("cuda", 0)
