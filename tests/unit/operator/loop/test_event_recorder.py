"""Events are best effort: handling of events that the API server does not accept."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
from kubernetes.aio.client import ApiException
from pseudoreal_operator.cluster.api import Api, Json, Name
from pseudoreal_operator.loop import event_recorder
from pseudoreal_operator.loop.counts import Counts
from pseudoreal_operator.loop.event_recorder import EventRecorder
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


def event(message: str) -> Json:
    return {"reason": "Accepted", "message": message}


def post_events(server: Server, *events: tuple[Name, str], counts: Counts | None = None) -> None:
    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), counts or Counts())
        async with recorder.posting():
            for job, message in events:
                recorder.post(job, [event(message)])
            await asyncio.sleep(10_000)
        assert recorder._waiting == {}

    virtual_time.run(main())


def test_events_of_a_job_are_posted_in_their_order() -> None:
    server = Server()
    post_events(server, (JOB, "1"), (OTHER, "2"), (JOB, "3"), (JOB, "4"))
    assert [message for message, _ in server.posted if message != "2"] == ["1", "3", "4"]


def test_at_the_end_what_waits_is_posted() -> None:
    server = Server()

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), Counts())
        async with recorder.posting():
            recorder.post(JOB, [event("1"), event("2")])
            recorder.post(OTHER, [event("3")])

    virtual_time.run(main())
    assert sorted(message for message, _ in server.posted) == ["1", "2", "3"]


def test_the_end_does_not_wait_for_an_api_server_that_is_away() -> None:
    server, ended = Server(lambda _event, _now: OSError("down")), list[float]()

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), Counts())
        async with recorder.posting():
            recorder.post(JOB, [event("1")])
        ended.append(asyncio.get_running_loop().time())

    virtual_time.run(main())
    assert server.posted == []
    assert ended == [event_recorder.LAST_SECONDS]


@pytest.mark.parametrize("error", [ApiException(status=429), ApiException(status=404), OSError("down"), TimeoutError()])
def test_an_event_that_may_come_later_waits_and_those_of_others_do_not(error: Exception) -> None:
    server = Server(lambda event, now: error if now < 30 and event["message"] == "1" else None)
    post_events(server, (JOB, "1"), (OTHER, "2"), (JOB, "3"))
    assert server.posted[0] == ("2", 0)
    assert [message for message, _ in server.posted[1:]] == ["1", "3"]
    assert 30 <= server.posted[1][1] <= 62


@pytest.mark.parametrize("status", [400, 403, 422])
def test_an_event_that_is_refused_is_given_up(status: int) -> None:
    counts, server = Counts(), Server(lambda event, _: ApiException(status=status) if event["message"] == "1" else None)
    post_events(server, (JOB, "1"), (JOB, "2"), counts=counts)
    assert (server.posted, counts.lost_events) == ([("2", 0)], 1)


def test_an_api_server_that_is_away_for_long_gets_no_old_events() -> None:
    counts, server = Counts(), Server(lambda _, now: OSError("down") if now < 3600 else None)
    post_events(server, (JOB, "1"), (JOB, "2"), counts=counts)
    assert counts.lost_events == 2
    assert server.posted == []


def test_the_memory_is_bounded_and_what_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_recorder, "MOST_WAITING", 2)
    counts, server = Counts(), Server()
    post_events(server, (JOB, "1"), (Name("b", "j"), "2"), (Name("c", "j"), "3"), counts=counts)
    assert [message for message, _ in server.posted] == ["1", "2"]
    assert counts.lost_events == 1


def test_the_events_of_one_namespace_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_recorder, "MOST_WAITING", 8)
    counts, server = Counts(), Server()
    post_events(server, *((JOB, str(number)) for number in range(10)), (Name("alice", "llm"), "hers"), counts=counts)
    assert {message for message, _ in server.posted} == {"0", "1", "hers"}
    assert counts.lost_events == 8


def test_events_are_posted_again_after_any_number_of_failures() -> None:
    """Every worker has dropped events after MOST_TRIES attempts."""
    jobs = [Name("default", f"job-{number}") for number in range(6)]
    counts, server = Counts(), Server(lambda _, now: ApiException(status=500) if now < 2000 else None)

    async def main() -> None:
        recorder = EventRecorder(cast(Api, server), counts)
        async with recorder.posting():
            for job in jobs:
                recorder.post(job, [event("1"), event("2")])
            await asyncio.sleep(2000)
            assert counts.lost_events == 12
            for job in jobs:
                recorder.post(job, [event("3")])
            await asyncio.sleep(100)
            assert dead_tasks() == []

    virtual_time.run(main())
    assert [message for message, _ in server.posted] == ["3"] * 6
