"""The endpoint over TLS, with a real client."""

import asyncio
import json
import ssl
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientError, ClientResponse, ClientSession
from kubernetes.aio.client import ApiException
from pseudoreal_api.wire.reports import REPORT_BYTES, REPORT_PATH, PodReport, RankReport, ReportAnswer
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_operator.cluster.bounds import TOO_LARGE, Unreadable
from pseudoreal_operator.endpoint import listener, server
from pseudoreal_operator.endpoint.identity import REJECTIONS_AT_ONCE, Identities
from pseudoreal_operator.endpoint.server import Reports, run_endpoint
from pseudoreal_operator.metrics.registry import REGISTRY
from pseudoreal_operator.observe.report_store import ReportStore
from pseudoreal_operator.observe.stages import Execution, StageKind
from structlog.testing import capture_logs

from tests.unit.operator.endpoint.support.clock import HandClock
from tests.unit.operator.endpoint.support.fake_api import FakeApi
from tests.unit.operator.endpoint.support.known import HOST, JOB, make_tls_context
from tests.unit.operator.observe.support.reports import PODS

EXECUTION = Execution("pseudo", StageKind.TRAIN, 1)
REPORT = PodReport(ranks=[RankReport(rank=0, activity="computing", seconds=0.5, step=3)])


@dataclass(frozen=True)
class Endpoint:
    session: ClientSession
    url: str
    trusted: ssl.SSLContext

    async def post(self, data: Any = None, token: str = "good", **headers: str) -> ClientResponse:
        sent = {"Authorization": f"Bearer {token}"} | headers
        body = REPORT.to_json() if data is None else data
        answer = await self.session.post(self.url, data=body, headers=sent, ssl=self.trusted, server_hostname=HOST)
        await answer.read()
        return answer


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("tls"))
    authority.issue("tls", hosts=[HOST])
    return authority


@pytest.fixture
def report_store() -> ReportStore:
    report_store = ReportStore()
    report_store.follow(JOB, PODS)
    return report_store


@pytest.fixture
async def endpoint(
    request: pytest.FixtureRequest, api: FakeApi, report_store: ReportStore, clock: HandClock, authority: Authority
) -> AsyncIterator[Endpoint]:
    if "short_timeouts" in request.fixturenames:
        request.getfixturevalue("short_timeouts")
    reports = Reports(Identities(api, (), clock), report_store, clock)
    trusted = ssl.create_default_context(cafile=str(authority.certificate))
    async with run_endpoint(reports, make_tls_context(authority), port=0) as port, ClientSession() as session:
        yield Endpoint(session, f"https://127.0.0.1:{port}{REPORT_PATH}", trusted)


async def test_valid_report_is_stored_and_answered(endpoint: Endpoint, report_store: ReportStore) -> None:
    answer = await endpoint.post()
    assert answer.status == 200
    assert ReportAnswer.model_validate_json(await answer.text()) == ReportAnswer(finish_phase=False)
    (last_report,) = report_store.of_job(JOB)
    assert (last_report.execution, last_report.index, last_report.report) == (EXECUTION, 0, REPORT)


async def test_reports_are_counted_by_answer_status(endpoint: Endpoint) -> None:
    def count_of(status: int) -> float:
        return REGISTRY.get_sample_value("pseudoreal_reports_total", {"status": str(status)}) or 0.0

    before = [count_of(status) for status in (200, 400, 413)]
    assert (await endpoint.post()).status == 200
    assert (await endpoint.post("hello")).status == 400
    assert (await endpoint.post("x" * (REPORT_BYTES + 1))).status == 413
    assert [count_of(status) for status in (200, 400, 413)] == [number + 1 for number in before]


async def test_answer_carries_the_request_to_finish_the_phase(endpoint: Endpoint, report_store: ReportStore) -> None:
    report_store.follow(JOB, PODS, frozenset({"pseudo"}))
    assert await (await endpoint.post()).json() == {"finishPhase": True, "restartsInPlace": 0}
    report_store.follow(JOB, PODS, frozenset({"real"}))
    assert await (await endpoint.post()).json() == {"finishPhase": False, "restartsInPlace": 0}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "this is no report: Invalid JSON"),
        ("hello", "this is no report: Invalid JSON"),
        (b"\xff\xfe", "this is no report"),
        ("[]", "this is no report"),
        ('{"ranks": [{"rank": 0, "activity": "-", "seconds": 0, "step": 1}]}', "ranks.0.activity: String should match"),
        ('{"ranks": [{"rank": 0, "activity": "computing", "seconds": 0, "step": -1}]}', "ranks.0.step: Input should"),
    ],
)
async def test_malformed_report_is_rejected_with_400(
    endpoint: Endpoint, report_store: ReportStore, body: Any, says: str
) -> None:
    answer = await endpoint.post(body)
    assert answer.status == 400
    assert says in await answer.text()
    assert report_store.of_job(JOB) == ()


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("progress", "loss", float("nan")),
        ("progress", "remaining_seconds", float("inf")),
        ("progress", "step", 2**63),
        ("progress", "tokens", -(2**64)),
        ("checkpoint", "seconds", 1e300),
        ("checkpoint", "step", 2**63),
    ],
)
async def test_report_with_numbers_beyond_the_status_is_rejected(
    endpoint: Endpoint, part: str, key: str, value: float
) -> None:
    progress = {"phase": "pseudo", "step": 3, "total_steps": 9, "tokens": 2**62, "loss": 1.5, "global_cursor": 8}
    progress |= dict.fromkeys(("learning_rate", "tokens_per_second", "seconds", "remaining_seconds"), 2.5)
    body: dict[str, Any] = {"progress": progress, "checkpoint": {"name": "pseudo-2", "step": 2, "seconds": 7.5}}
    assert (await endpoint.post(json.dumps(body))).status == 200
    body[part][key] = value
    answer = await endpoint.post(json.dumps(body))
    assert answer.status == 400
    said = await answer.text()
    assert "not finite, or too large" in said or f"{part}.{key}: Input should be less" in said


@pytest.mark.parametrize("header", ["", "Basic Z29vZA==", "Bearer", "Bearer ", "good"])
async def test_report_without_a_token_is_rejected(endpoint: Endpoint, api: FakeApi, header: str) -> None:
    answer = await endpoint.post(Authorization=header)
    assert answer.status == 401
    assert "Authorization: Bearer" in await answer.text()
    assert api.reviews == 0


async def test_report_with_an_invalid_token_is_rejected(endpoint: Endpoint, report_store: ReportStore) -> None:
    answer = await endpoint.post(token="forged")
    assert answer.status == 401
    assert "not valid" in await answer.text()
    assert report_store.of_job(JOB) == ()


async def test_report_of_a_pod_that_does_not_train_is_rejected(endpoint: Endpoint, api: FakeApi) -> None:
    api.add("delink", name="j-real-delink-e1-0", stage="delink")
    answer = await endpoint.post(token="delink")
    assert answer.status == 403
    assert await answer.text() == "pod j-real-delink-e1-0 trains no PseudoRealJob"


async def test_too_long_report_is_rejected(endpoint: Endpoint, report_store: ReportStore) -> None:
    answer = await endpoint.post("x" * (REPORT_BYTES + 1))
    assert answer.status == 413
    assert report_store.of_job(JOB) == ()


async def test_too_long_report_without_content_length_is_rejected(endpoint: Endpoint) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(REPORT_BYTES // 4096 + 1):
            yield b"x" * 4096

    assert (await endpoint.post(chunks())).status == 413


async def test_endless_report_is_rejected_after_its_time(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "READ_SECONDS", 0.05)

    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    assert (await endpoint.post(never())).status == 408


async def test_pod_that_reports_too_often_is_rejected(endpoint: Endpoint, clock: HandClock) -> None:
    answers = [await endpoint.post() for _ in range(7)]
    assert [answer.status for answer in answers] == [200] * 5 + [429] * 2
    assert answers[-1].headers["Retry-After"] == "10"
    clock.now += 1
    assert (await endpoint.post()).status == 200


async def test_new_tokens_do_not_let_a_pod_report_more_often(endpoint: Endpoint, api: FakeApi) -> None:
    for number in range(7):
        api.add(f"good-{number}")
    statuses = [(await endpoint.post(token=f"good-{number}")).status for number in range(7)]
    assert statuses == [200] * 5 + [429] * 2


async def test_other_indices_do_not_let_a_pod_report_more_often(endpoint: Endpoint, api: FakeApi) -> None:
    statuses = list[int]()
    for number in range(7):
        api.add(f"good-{number}", index=number)
        statuses.append((await endpoint.post(token=f"good-{number}")).status)
    assert statuses == [200] * 5 + [429] * 2


async def test_rate_limit_of_one_pod_does_not_affect_another(
    endpoint: Endpoint, api: FakeApi, report_store: ReportStore
) -> None:
    api.add("other", name="j-pseudo-e1-1", uid="other-uid", index=1)
    for _ in range(7):
        await endpoint.post()
    assert (await endpoint.post(token="other")).status == 200
    assert {last_report.index for last_report in report_store.of_job(JOB)} == {0, 1}


async def test_flood_of_unknown_tokens_is_rejected_with_429(endpoint: Endpoint) -> None:
    answers = [await endpoint.post(token=f"wrong-{number}") for number in range(REJECTIONS_AT_ONCE + 1)]
    assert [answer.status for answer in answers] == [401] * REJECTIONS_AT_ONCE + [429]
    assert answers[-1].headers["Retry-After"] == "10"


@pytest.mark.parametrize(
    "failure",
    [
        ApiException(status=500),
        ClientError("cut"),
        OSError("down"),
        TimeoutError(),
        Unreadable(TOO_LARGE, "the pod has more than 2,097,152 bytes"),
    ],
)
async def test_failing_token_review_answers_503(endpoint: Endpoint, api: FakeApi, failure: Exception) -> None:
    api.failure = failure
    answer = await endpoint.post()
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "10"
    assert "API server" in await answer.text()
    api.failure = None
    assert (await endpoint.post()).status == 200


async def test_report_for_a_job_that_is_not_followed_yet_answers_503(
    endpoint: Endpoint, report_store: ReportStore
) -> None:
    report_store.forget(JOB)
    answer = await endpoint.post()
    assert (answer.status, answer.headers["Retry-After"]) == (503, "10")
    assert "does not follow the job" in await answer.text()
    report_store.follow(JOB, PODS)
    assert (await endpoint.post()).status == 200


async def test_internal_error_is_logged_and_answered(
    endpoint: Endpoint, report_store: ReportStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(report_store, "store", fail)
    with capture_logs() as logs:
        statuses = [(await endpoint.post()).status for _ in range(3)]
    assert statuses == [500] * 3
    assert [entry["event"] for entry in logs] == ["report_failed"], "a flood of them floods no log"


async def test_clients_that_do_not_speak_http_leave_no_log_line(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    address = urlsplit(endpoint.url)
    reader, writer = await asyncio.open_connection(
        address.hostname, address.port, ssl=endpoint.trusted, server_hostname=HOST
    )
    writer.write(b"\x00\xff no http\r\n\r\n")
    assert b" 400 " in await reader.readline()
    writer.close()
    assert caplog.records == []


async def test_other_paths_and_methods_are_rejected(endpoint: Endpoint) -> None:
    for method, url, status in (("GET", endpoint.url, 405), ("POST", f"{endpoint.url}s", 404)):
        async with endpoint.session.request(method, url, ssl=endpoint.trusted, server_hostname=HOST) as answer:
            assert answer.status == status


async def test_reports_of_a_pod_share_a_connection(endpoint: Endpoint) -> None:
    for _ in range(3):
        assert (await endpoint.post()).status == 200
    assert endpoint.session.connector is not None
    assert sum(map(len, endpoint.session.connector._conns.values())) == 1


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small time limits; to be used before the endpoint is created."""
    for name in ("IDLE_SECONDS", "HANDSHAKE_SECONDS", "AUTHENTICATION_SECONDS"):
        monkeypatch.setattr(listener, name, 0.3)
    monkeypatch.setattr(server, "IDLE_SECONDS", 0.3)


@pytest.mark.usefixtures("short_timeouts")
async def test_silent_connection_is_closed(endpoint: Endpoint) -> None:
    """Before a handshake, after a handshake, and after a report."""
    port = int(endpoint.url.split(":")[2].split("/")[0])
    silent, _ = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(60):
        greeted = await _connect(endpoint, port)
        await _wait_until_accepted(endpoint)
        assert await silent.read() == b""
        assert await greeted.read() == b""
        # The client takes a new connection where the old one was closed.
        await _wait_until_accepted(endpoint)


async def _connect(endpoint: Endpoint, port: int) -> asyncio.StreamReader:
    """Return a connection after its handshake, for which a busy machine may need more than one attempt."""
    while True:
        with suppress(OSError):
            reader, _ = await asyncio.open_connection("127.0.0.1", port, ssl=endpoint.trusted, server_hostname=HOST)
            return reader


async def _wait_until_accepted(endpoint: Endpoint) -> None:
    """Report until the pod is heard: an idle connection may be closed just as a report is sent on it."""
    while await _post_status(endpoint) != 200:
        await asyncio.sleep(0.05)


async def _post_status(endpoint: Endpoint) -> int:
    """Return the status of the answer to a report; 0: not connected."""
    with suppress(ClientError):
        return (await endpoint.post()).status
    return 0


async def test_connected_pod_takes_little_memory(endpoint: Endpoint) -> None:
    """Both ends of each connection are in this process, so the limit is doubled."""
    address, count, open_ones = urlsplit(endpoint.url), 20, []
    tracemalloc.start()
    try:
        for number in range(count + 1):
            if number == 1:
                first, _ = tracemalloc.get_traced_memory()
            open_ones.append(
                await asyncio.open_connection(
                    address.hostname, address.port, ssl=endpoint.trusted, server_hostname=HOST
                )
            )
        taken = tracemalloc.get_traced_memory()[0] - first
    finally:
        tracemalloc.stop()
        for _, writer in open_ones:
            writer.close()
    assert taken / count < 2 * 64 * 1024
