"""Events are best effort: handling of events that the API server does not accept."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.loop import event_recorder
from pseudoreal_operator.loop.event_recorder import EventRecorder
from pseudoreal_operator.metrics.registry import OperatorCounters
from pseudoreal_operator.tasks import dead_tasks

from tests.unit.operator.cluster.support import virtual_time

JOB, OTHER = Name("default", "llm"), Name("default", "other")


class Server:
    def __init__(self, refuses: Callable[[Json, float], Exception | None] = lambda _event, _now: None) -> None:
        self._refuses = refuses
        self.posted: list[tuple[str, float]] = []

    async def post(self, event: Json) -> None:
        now = asyncio.get_running_loop().time()
        if error := self._refuses(event, now):
            raise error
        self.posted.append((event["message"], now))


def make_event(message: str) -> Json:
    return {"reason": "Accepted", "message": message}


def post_events(server: Server, *events: tuple[Name, str], counters: OperatorCounters | None = None) -> None:
    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), counters or OperatorCounters())
        async with recorder.run_posters():
            for job, message in events:
                recorder.post(job, [make_event(message)])
            await asyncio.sleep(10_000)
        assert recorder._waiting == {}

    virtual_time.run(main())


def test_events_of_a_job_are_posted_in_order() -> None:
    server = Server()
    post_events(server, (JOB, "1"), (OTHER, "2"), (JOB, "3"), (JOB, "4"))
    assert [message for message, _ in server.posted if message != "2"] == ["1", "3", "4"]


def test_waiting_events_are_posted_at_shutdown() -> None:
    server = Server()

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), OperatorCounters())
        async with recorder.run_posters():
            recorder.post(JOB, [make_event("1"), make_event("2")])
            recorder.post(OTHER, [make_event("3")])

    virtual_time.run(main())
    assert sorted(message for message, _ in server.posted) == ["1", "2", "3"]


def test_shutdown_waits_a_second_for_an_unavailable_api_server() -> None:
    server, ended = Server(lambda _event, _now: OSError("down")), list[float]()

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), OperatorCounters())
        async with recorder.run_posters():
            recorder.post(JOB, [make_event("1")])
        ended.append(asyncio.get_running_loop().time())

    virtual_time.run(main())
    assert server.posted == []
    assert ended == [event_recorder.SHUTDOWN_SECONDS]


@pytest.mark.parametrize("error", [ApiException(status=429), ApiException(status=404), OSError("down"), TimeoutError()])
def test_retried_event_does_not_delay_events_of_other_jobs(error: Exception) -> None:
    server = Server(lambda event, now: error if now < 30 and event["message"] == "1" else None)
    post_events(server, (JOB, "1"), (OTHER, "2"), (JOB, "3"))
    assert server.posted[0] == ("2", 0)
    assert [message for message, _ in server.posted[1:]] == ["1", "3"]
    assert 30 <= server.posted[1][1] <= 62


@pytest.mark.parametrize("status", [400, 403, 422])
def test_rejected_event_is_dropped(status: int) -> None:
    counters, server = (
        OperatorCounters(),
        Server(lambda event, _: ApiException(status=status) if event["message"] == "1" else None),
    )
    post_events(server, (JOB, "1"), (JOB, "2"), counters=counters)
    assert (server.posted, counters.lost_events) == ([("2", 0)], 1)


def test_old_events_are_dropped_while_the_api_server_is_away() -> None:
    counters, server = OperatorCounters(), Server(lambda _, now: OSError("down") if now < 3600 else None)
    post_events(server, (JOB, "1"), (JOB, "2"), counters=counters)
    assert counters.lost_events == 2
    assert server.posted == []


def test_waiting_events_are_bounded_and_lost_ones_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_recorder, "MOST_WAITING", 2)
    counters, server = OperatorCounters(), Server()
    post_events(server, (JOB, "1"), (Name("b", "j"), "2"), (Name("c", "j"), "3"), counters=counters)
    assert [message for message, _ in server.posted] == ["1", "2"]
    assert counters.lost_events == 1


def test_events_of_one_namespace_leave_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_recorder, "MOST_WAITING", 8)
    counters, server = OperatorCounters(), Server()
    post_events(
        server, *((JOB, str(number)) for number in range(10)), (Name("alice", "llm"), "hers"), counters=counters
    )
    assert {message for message, _ in server.posted} == {"0", "1", "hers"}
    assert counters.lost_events == 8


def test_event_workers_survive_any_number_of_failures() -> None:
    """Every worker has dropped events after MOST_ATTEMPTS attempts."""
    jobs = [Name("default", f"job-{number}") for number in range(6)]
    counters, server = OperatorCounters(), Server(lambda _, now: ApiException(status=500) if now < 2000 else None)

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), counters)
        async with recorder.run_posters():
            for job in jobs:
                recorder.post(job, [make_event("1"), make_event("2")])
            await asyncio.sleep(2000)
            assert counters.lost_events == 12
            for job in jobs:
                recorder.post(job, [make_event("3")])
            await asyncio.sleep(100)
            assert dead_tasks() == []

    virtual_time.run(main())
    assert [message for message, _ in server.posted] == ["3"] * 6
