"""How much is tried: long tests, full budgets and new random seeds only with `--deep`, whatever marks are chosen; tests
that need a package of `PEERS` skip where it is missing, except with `--all-packages`, as in `make test`."""

import faulthandler
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import structlog
from hypothesis import settings

from tests.support.depth import DEPTH

if TYPE_CHECKING:
    from playwright.sync_api import Browser

settings.register_profile("usual", deadline=None)
settings.register_profile("deep", deadline=None, max_examples=2000, print_blob=True)

PEERS = frozenset(
    {
        *("adlfs", "azure", "boto3", "botocore", "gcsfs", "google", "huggingface_hub", "moto", "s3fs"),  # storage
        *("pyarrow", "tokenizers", "zstandard"),  # `pseudoreal data`
        *("mlflow", "tensorboardX", "wandb"),  # loggers
        *("lm_eval", "transformers"),  # other implementations
        *("ipykernel", "nbclient", "nbformat"),  # run the notebook
        "lupa",  # runs Argo CD's health check
        "check_jsonschema",
        "playwright",  # opens pages in a browser
        "pip",  # whose settings the builds of images take over
    }
)
"""Packages that are in .venv, but not in the environment of `make run` and `make test-unit`, by the names of their
imports."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-packages", action="store_true", help="a missing package is an error, not a reason to skip")
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


@pytest.fixture(autouse=True)
def _own_logs() -> Iterator[None]:
    """Undo what a test, or a command that it calls, configures: the logs of a test go where that test reads them."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A browser for all tests of a module."""
    from tests.support.browser import launched  # the package is one of PEERS

    with launched() as browser:
        yield browser


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


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call: pytest.CallInfo[object] | None = report.__dict__.get("call")
    peer = None if call is None or call.excinfo is None else _missing_peer(call.excinfo.value, collector.config)
    if peer is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {_reason(peer)}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    with _skip_without_peers(item.config):
        for package in (package for mark in item.iter_markers("needs") for package in mark.args):
            if find_spec(package) is None:
                raise ModuleNotFoundError(f"this test needs {package}", name=package)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    with _skip_without_peers(pyfuncitem.config):
        return (yield)


@contextmanager
def _skip_without_peers(config: pytest.Config) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        peer = _missing_peer(error, config)
        if peer is not None:
            pytest.skip(_reason(peer))
        raise


def _missing_peer(error: BaseException, config: pytest.Config) -> str | None:
    """Return the package of `PEERS` whose absence caused the error; None for every other error."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, ModuleNotFoundError):
        seen = seen.__cause__ or seen.__context__
    name = None if seen is None else (seen.name or "").partition(".")[0]
    return name if name in PEERS and not config.getoption("--all-packages") else None


def _reason(peer: str) -> str:
    return f"{peer} is not in this environment; `make venv` installs it, and `make test` runs this test"
