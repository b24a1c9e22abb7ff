"""Hostile objects and hostile answers of the API server: the operator, a process, survives and serves all other
jobs."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudoreal_api.base import PLURAL

from tests.support.operator_process import Operator
from tests.support.patience import wait_for
from tests.unit.operator.survival.support.api_server import ApiServer
from tests.unit.operator.survival.support.objects import DEEP, EMPTY_MAPS, VARIABLES, child, deep_job, job, large_job

LIMIT_BYTES = 512 * 2**20
"""Memory limit of the operator in the chart."""


@pytest.fixture
def server() -> Iterator[ApiServer]:
    made = ApiServer()
    with made.running():
        yield made


@pytest.fixture
def operator(server: ApiServer, tmp_path: Path) -> Iterator[Operator]:
    """An operator that is not started yet. It is a program of its own, because a forked process would include the
    memory of the server's other imports."""
    kubeconfig = server.write_kubeconfig(tmp_path / "kubeconfig")
    made = Operator(kubeconfig, "", tmp_path / "log", pod="op-0", is_program=True)
    yield made
    if made.is_running:
        made.kill()


def peak_bytes(operator: Operator) -> int:
    assert operator.process
    status = Path(f"/proc/{operator.process.pid}/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def await_status(server: ApiServer, operator: Operator, name: str, patience: float = 60.0) -> None:
    wait_for(
        f"the status of {name}", lambda: server.statuses_of(name) or not operator.is_running, operator.said, patience
    )
    assert operator.is_running, operator.said()


def reasons(server: ApiServer, name: str) -> list[str]:
    return [condition["reason"] for status in server.statuses_of(name) for condition in status["conditions"]]


def check(operator: Operator) -> None:
    """Check that all tasks run, and that the memory has never come near its limit."""
    assert operator.health()["dead_tasks"] == []
    assert peak_bytes(operator) < LIMIT_BYTES * 0.6, f"{peak_bytes(operator) / 2**20:.0f} MiB"
    assert operator.lines("task_died") == operator.lines("worker_failed") == []


def test_objects_beyond_the_bounds_are_named_and_left_alone_and_all_others_are_served(
    server: ApiServer, operator: Operator
) -> None:
    for number in range(16):
        server.put(PLURAL, large_job(f"large-{number}"))
    server.put(PLURAL, deep_job("deep"))
    server.put(PLURAL, job("honest", "alice"))
    for number in range(50):
        server.put("pods", child("Pod", f"maps-{number}", b'{"x":' + EMPTY_MAPS + b"}"))
        server.put("jobs", child("Job", f"maps-{number}", b'{"x":' + EMPTY_MAPS + b"}"))
    server.put("pods", child("Pod", "variables", b'{"containers":[{"name":"c","env":[' + VARIABLES + b"]}]}"))
    operator.start()
    await_status(server, operator, "honest")
    for name in ("deep", "large-0", "large-15"):
        await_status(server, operator, name)
        assert reasons(server, name) == ["Unreadable"]
    at_start = peak_bytes(operator)

    # While it runs: lines of watches of every kind and size, and whoever comes after them is served.
    for number in range(8):
        server.put(PLURAL, large_job(f"large-{number}"), "MODIFIED")
        server.put("pods", child("Pod", f"long-{number}", b'{"x":"' + b"<" * 6_000_000 + b'"}'))
        server.put("jobs", child("Job", f"deep-{number}", DEEP))
    server.put(PLURAL, deep_job("deep-2"))
    server.put(PLURAL, job("late", "alice"))
    begun = time.monotonic()
    await_status(server, operator, "late")
    await_status(server, operator, "deep-2")
    print(
        f"peak {at_start / 2**20:.0f} MiB at the start, {peak_bytes(operator) / 2**20:.0f} MiB at the end;"
        f" served after {time.monotonic() - begun:.1f} s"
    )
    assert len(server.statuses_of("deep")) == 1, "it is said once"
    counted = operator.metrics()
    skipped = {dict(labels)["reason"] for (name, labels), _ in counted.items() if "objects_skipped_total" in name}
    assert skipped == {"TooLarge", "TooManyValues", "TooDeep"}
    check(operator)


def test_whatever_becomes_of_the_api_server_the_operator_lives_and_serves_when_it_is_back(
    server: ApiServer, operator: Operator
) -> None:
    server.fault = "refused"
    server.put(PLURAL, job("first", "alice"))
    operator.start()
    wait_for("its health", lambda: _health(operator), operator.said)
    time.sleep(1)
    assert operator.health()["dead_tasks"] == [], "it waits for the API server"
    server.fault = ""
    await_status(server, operator, "first", 20)
    wait_for("its readiness", operator.is_ready, operator.said)
    for fault in ("500 event", "404 watch", "503", "refused", "404"):
        server.fault = fault
        server.hang_up()
        time.sleep(1)
        assert operator.health()["dead_tasks"] == [], fault
    server.fault = ""
    server.put(PLURAL, job("honest", "alice"))
    await_status(server, operator, "honest", 20)
    check(operator)
    assert operator.stop() == 0


def _health(operator: Operator) -> bool:
    try:
        return bool(operator.health()["tasks"])
    except OSError:
        return False
