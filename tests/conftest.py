"""How much is tried, and what runs in one process when pytest-xdist runs tests side by side.

Long tests, full budgets and new random seeds come only with `--deep`, whatever marks are chosen.
"""

import faulthandler
import secrets
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

from tests.support.depth import DEPTH

if TYPE_CHECKING:
    from xdist.scheduler import LoadGroupScheduling

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
        # The processes of xdist take these options over, so all of them collect the same tests. Hypothesis's own plugin
        # reads the second one.
        config.option.seed = config.option.hypothesis_seed = DEPTH.seed = (
            secrets.randbelow(10**9) if given is None else given
        )


def pytest_report_header() -> str | None:
    return f"deep; to repeat what is drawn: --deep --seed={DEPTH.seed}" if DEPTH.is_deep else None


# Before xdist, which reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.get_closest_marker("long") and not DEPTH.is_deep]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    if config.getoption("loadgroup", False):  # set in the processes of xdist
        items.sort(key=lambda item: _GROUPS.index(_group(item)))
        for item in items:
            if group := _group(item):
                item.add_marker(pytest.mark.xdist_group(group))


_GROUPS = ("cluster", "api-server", "engine", "")
"""Tests that share a cluster, an API server, or the results of ranks run in one process. In starting order: each group
takes minutes, so none is left for the end."""


def _group(item: pytest.Item) -> str:
    """Return the test's group; "" for none."""
    if item.nodeid.startswith("tests/e2e/"):
        return "cluster"
    if item.nodeid.startswith("tests/integration/"):
        return "api-server"
    return "engine" if "engine_results" in getattr(item, "fixturenames", ()) else ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> "LoadGroupScheduling":
    """Keep tests without a group together by file, because they share the fixtures of their module."""
    from xdist.scheduler import LoadGroupScheduling

    class ByGroupOrFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope: str = super()._split_scope(nodeid)
            return scope if scope != nodeid else nodeid.partition("::")[0]

    return ByGroupOrFile(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    # Stacks are said of tests that hang (faulthandler_timeout). A long test may be as long as it likes; and to say the
    # stacks of threads that run has crashed the interpreter.
    if item.get_closest_marker("long"):
        faulthandler.cancel_dump_traceback_later()
