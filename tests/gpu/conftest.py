"""Options, time limits and printed figures of the GPU tests; `--device cpu` tries the tests themselves
without a GPU."""

import faulthandler
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest
import torch

_STUCK_SECONDS = 20
"""A test that exceeds its limit by this many seconds is stuck inside a CUDA call; its process ends with a traceback."""
_KEPT_OF_TINY = 2

Figure = Callable[[str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: only what needs no GPU")
    parser.addoption("--tiny", action="store_true", help=f"{_KEPT_OF_TINY} cases of each test")
    parser.addoption("--limit", type=int, default=120, help="seconds of a test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--tiny"):
        return
    kept: dict[str, int] = {}
    for item in [*items]:
        name = f"{item.location[0]}::{getattr(item, 'originalname', item.name)}"
        kept[name] = kept.get(name, 0) + 1
        if kept[name] > _KEPT_OF_TINY:
            items.remove(item)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--device") == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no GPU that it can use on this machine, so nothing of CUDA was run")


@pytest.fixture(autouse=True)
def _limit(request: pytest.FixtureRequest) -> Iterator[None]:
    limit = request.config.getoption("--limit")

    def too_long(_: int, __: FrameType | None) -> None:
        raise TimeoutError(f"the test takes longer than {limit} s")

    signal.signal(signal.SIGALRM, too_long)
    signal.alarm(limit)
    faulthandler.dump_traceback_later(limit + _STUCK_SECONDS, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    """Return the first GPU, or the CPU if chosen."""
    return torch.device("cpu") if request.config.getoption("--device") == "cpu" else torch.device("cuda", 0)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """Return the first GPU; without a GPU the test is skipped."""
    if device.type != "cuda":
        pytest.skip("this needs a GPU; on the CPU there is nothing to see")
    return device


@pytest.fixture
def figure(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Figure:
    """Return a function that prints a figure of the test, bypassing pytest's capture."""

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n    {request.node.name}: {text}", end="", flush=True)

    return say
