"""The parts around the plan: settings, wake-ups, the probe, kopf's settings."""

import asyncio
from pathlib import Path

import kopf
import pytest
from pseudoreal_operator.controller.handlers import live_watchers
from pseudoreal_operator.controller.kopf_settings import kopf_settings
from pseudoreal_operator.controller.wakeups import Wakeups
from pseudoreal_operator.settings import Lease, ReportServer, read_settings

KEY = ("default", "job")


def test_settings() -> None:
    settings = read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t:1", "PSEUDOREAL_NAMESPACES": "a, b,"})
    assert (settings.trainer_image, settings.pull_policy, settings.namespaces) == ("t:1", "IfNotPresent", ("a", "b"))
    assert read_settings({"PSEUDOREAL_TRAINER_IMAGE": "t:1"}).namespaces == ()


def test_the_endpoint_and_the_lease_are_optional() -> None:
    alone = {"PSEUDOREAL_TRAINER_IMAGE": "t:1"}
    settings = read_settings(alone)
    assert (settings.reports, settings.lease) == (None, None)
    with_both = {"PSEUDOREAL_TLS_DIRECTORY": "/tls", "PSEUDOREAL_LEASE": "ops/pseudoreal", "PSEUDOREAL_POD_NAME": "pod"}
    settings = read_settings(alone | with_both)
    assert settings.reports == ReportServer(8443, "/tls/tls.crt", "/tls/tls.key")
    assert settings.lease == Lease("ops", "pseudoreal", "pod")
    settings = read_settings(alone | with_both | {"PSEUDOREAL_REPORT_PORT": "9443"})
    assert settings.reports
    assert settings.reports.port == 9443


def test_settings_that_are_files(tmp_path: Path) -> None:
    (tmp_path / "nccl.conf").write_text("NCCL_IB_HCA=mlx5_0\n")
    (tmp_path / "ca.crt").write_text("")
    settings = read_settings(
        {
            "PSEUDOREAL_TRAINER_IMAGE": "t:1",
            "PSEUDOREAL_NCCL_CONFIG": str(tmp_path / "nccl.conf"),
            "PSEUDOREAL_REPORT_URL": "https://operator.example",
            "PSEUDOREAL_REPORT_CA": str(tmp_path / "ca.crt"),
        }
    )
    assert settings.nccl_config == "NCCL_IB_HCA=mlx5_0\n"
    assert (settings.report_url, settings.report_ca) == ("https://operator.example", None)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({}, "PSEUDOREAL_TRAINER_IMAGE is not set"),
        ({"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_TRAINER_PULL_POLICY": "Maybe"}, "one of Always, IfNotPresent"),
        (
            {"PSEUDOREAL_TRAINER_IMAGE": "t", "PSEUDOREAL_NCCL_CONFIG": "/none"},
            "NCCL_CONFIG is /none, which",
        ),
    ],
)
def test_wrong_settings(environment: dict[str, str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read_settings(environment)


def test_kopf_neither_posts_events_nor_looks_for_namespaces() -> None:
    settings = kopf_settings()
    assert settings.persistence.finalizer == "pseudoreal.dev/cleanup"
    assert settings.posting.enabled is False
    assert settings.scanning.disabled is True
    assert settings.peering.standalone is True
    # They become query parameters, and the API server takes integers only.
    assert isinstance(settings.watching.server_timeout, int)
    assert settings.process.ultimate_exiting_timeout
    assert settings.process.ultimate_exiting_timeout < 30


async def test_the_probe_counts_the_watches_and_fails_when_one_is_dead() -> None:
    stop = asyncio.Event()
    tasks = [asyncio.create_task(stop.wait(), name=f"watcher for {kind}") for kind in ("jobs", "prj")]
    await asyncio.sleep(0)
    assert live_watchers(expected=2) == 2
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    with pytest.raises(kopf.PermanentError, match="1 of 2 watches run"):
        live_watchers(expected=2)
    stop.set()
    await asyncio.wait(tasks)


async def test_a_wake_up_during_a_pass_is_not_lost() -> None:
    wakeups = Wakeups()
    wakeups.add(KEY)
    wakeups.wake(KEY)
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
    # It was for one wait only.
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.wait(KEY, None), 0.01)


async def test_the_echo_of_our_own_status_wakes_nobody() -> None:
    wakeups = Wakeups()
    wakeups.add(KEY)
    wakeups.wake_on_change(KEY, (1, ""))
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
    wakeups.wake_on_change(KEY, (1, ""))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(wakeups.wait(KEY, None), 0.01)
    wakeups.wake_on_change(KEY, (2, ""))
    await asyncio.wait_for(wakeups.wait(KEY, None), 5)
