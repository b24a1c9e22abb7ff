"""How much is tried: long tests, full budgets and new random seeds only with `--deep`, whatever marks are chosen."""

import faulthandler
import secrets

import pytest
from hypothesis import settings

from tests.support.depth import DEPTH

settings.register_profile("usual", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="the long tests too, full budgets, a new random seed")
    parser.addoption("--seed", type=int, help="with --deep: the seed of what is drawn, to repeat a run")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    DEPTH.is_deep = bool(config.getoption("--deep"))
    settings.load_profile(DEPTH.of("usual", "deep"))
    if DEPTH.is_deep:
        given = config.getoption("--seed")
        DEPTH.seed = secrets.randbelow(10**9) if given is None else given
        # What hypothesis's own plugin reads.
        config.option.hypothesis_seed = DEPTH.seed


def pytest_report_header() -> str | None:
    return f"deep; to repeat what is drawn: --deep --seed={DEPTH.seed}" if DEPTH.is_deep else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if DEPTH.is_deep:
        return
    long = [item for item in items if item.get_closest_marker("long")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Stacks are said of tests that hang (faulthandler_timeout). A long test may be as long as it likes; and to say the
    # stacks of threads that run has crashed the interpreter.
    if item.get_closest_marker("long"):
        faulthandler.cancel_dump_traceback_later()
