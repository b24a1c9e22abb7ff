"""The endpoint under a crowd of useless connections: pods at other addresses report nevertheless."""

import asyncio
import math
import socket
import ssl
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
from pseudoreal_api.wire.reports import REPORT_PATH, PodReport, RankReport
from pseudoreal_dev.cluster.certificates import Authority
from pseudoreal_operator.endpoint import listener, unauthenticated
from pseudoreal_operator.endpoint.server import Reports, run_endpoint
from pseudoreal_operator.metrics.registry import REGISTRY
from pseudoreal_operator.observe.report_store import ReportStore

from tests.unit.operator.endpoint.support.known import HOST, JOB, KnownPods, make_tls_context
from tests.unit.operator.observe.support.reports import PODS as ALLOWED_PODS

REPORT = PodReport(ranks=[RankReport(rank=0, activity="computing", seconds=0.5, step=3)]).to_json()
PODS, CROWD, SECONDS = 40, 4000, 2.0
ALONE_SECONDS = 0.2
"""Maximum seconds that a pod needs without a crowd, on a machine without other work."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    authority = Authority(tmp_path_factory.mktemp("crowd"))
    authority.issue("tls", hosts=[HOST])
    return authority


@pytest.fixture
async def port(authority: Authority) -> AsyncIterator[int]:
    report_store = ReportStore()
    report_store.follow(JOB, ALLOWED_PODS)
    async with run_endpoint(Reports(KnownPods(), report_store), make_tls_context(authority), 0) as port:
        yield port


@pytest.fixture
def trusted(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(port: int, trusted: ssl.SSLContext, address: str) -> Ends:
    return await asyncio.open_connection(
        "127.0.0.1", port, ssl=trusted, server_hostname=HOST, local_addr=(address, 0), ssl_handshake_timeout=60
    )


async def post(ends: Ends, token: str) -> int:
    """Return the status of the answer to a report; 0 if there is none."""
    reader, writer = ends
    head = f"POST {REPORT_PATH} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {token}\r\n"
    writer.write(f"{head}Content-Length: {len(REPORT)}\r\n\r\n{REPORT}".encode())
    said = await reader.readline()
    while (line := await reader.readline()).strip():
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    if said:
        await reader.readexactly(length)
    return int(said.split()[1]) if said else 0


async def seconds_until_accepted(port: int, trusted: ssl.SSLContext, address: str, token: str) -> float:
    """Return the seconds until a pod that connects now is heard."""
    begun = time.monotonic()
    with suppress(OSError, asyncio.IncompleteReadError):
        ends = await connect(port, trusted, address)
        status = await post(ends, token)
        ends[1].close()
        if status == 200:
            return time.monotonic() - begun
    return math.inf


async def measure_pods(port: int, trusted: ssl.SSLContext, addresses: list[str]) -> list[float]:
    """Return the seconds until each of PODS pods, which connect within a second, is heard."""

    async def one(number: int) -> float:
        await asyncio.sleep(number / PODS)
        return await seconds_until_accepted(port, trusted, addresses[number % len(addresses)], f"pod-{number}")

    return await asyncio.gather(*(one(number) for number in range(PODS)))


async def measure_bound(port: int, trusted: ssl.SSLContext) -> float:
    """Return SECONDS, or more if the machine has other work: pods without a crowd then need longer, too."""
    alone = await measure_pods(port, trusted, OWN)
    return SECONDS * max(1.0, max(alone) / ALONE_SECONDS)


@asynccontextmanager
async def hold_connections(port: int, addresses: list[str], count: int, says: bytes = b"") -> AsyncIterator[None]:
    """Hold `count` connections in this context; each sends `says` and nothing more."""
    loop, held = asyncio.get_running_loop(), list[socket.socket]()
    try:
        for number in range(count):
            held.append(one := socket.socket())
            one.setblocking(False)
            one.bind((addresses[number % len(addresses)], 0))
            with suppress(OSError):
                await loop.sock_connect(one, ("127.0.0.1", port))
                await loop.sock_sendall(one, says)
        yield
    finally:
        for one in held:
            one.close()


@contextmanager
def cancel_afterwards(*works: asyncio.Task[None]) -> Iterator[None]:
    yield
    for work in works:
        work.cancel()


async def keep_connecting(port: int, address: str, says: bytes = b"") -> None:
    """Open 14 connections a second from one address, and leave them open."""
    held = list[Ends]()
    try:
        while True:
            with suppress(OSError):
                held.append(await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
                held[-1][1].write(says)
            await asyncio.sleep(1 / 14)
    finally:
        for _, writer in held:
            writer.close()


def first_handshake_bytes(trusted: ssl.SSLContext) -> bytes:
    """Return the first bytes of a client's handshake."""
    sent = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        trusted.wrap_bio(ssl.MemoryBIO(), sent, server_hostname=HOST).do_handshake()
    return sent.read()


MANY = [f"127.0.{net}.{host}" for net in (1, 2) for host in range(1, 41)]
SILENT = [f"127.0.0.{host}" for host in (9, 10, 11)]
OWN = [f"127.0.3.{host}" for host in range(1, PODS + 1)]


@pytest.mark.parametrize(
    ("says", "count"),
    [
        ("nothing", CROWD),
        ("no handshake", CROWD // 4),
        ("half a handshake", CROWD // 4),
        pytest.param("no handshake", CROWD, marks=pytest.mark.long),
        pytest.param("half a handshake", CROWD, marks=pytest.mark.long),
    ],
)
async def test_crowd_of_unauthenticated_connections_does_not_silence_pods(
    port: int, trusted: ssl.SSLContext, says: str, count: int
) -> None:
    """Three other addresses open connections all the time, and a crowd is already connected."""
    word = {"nothing": b"", "no handshake": b"GET / HTTP/1.1\r\n\r\n"}.get(says, first_handshake_bytes(trusted))
    most = await measure_bound(port, trusted)
    async with hold_connections(port, MANY, count, word):
        with cancel_afterwards(*(asyncio.create_task(keep_connecting(port, address, word)) for address in SILENT)):
            found = await measure_pods(port, trusted, OWN)
    assert len([seconds for seconds in found if seconds <= most]) == PODS, (most, found)


async def test_pods_that_share_an_address_with_a_silent_crowd_report(port: int, trusted: ssl.SSLContext) -> None:
    """As with the address of a node: pods in its network, or pods behind address translation."""
    most = await measure_bound(port, trusted)
    async with hold_connections(port, ["127.0.0.9"], 100):
        found = await measure_pods(port, trusted, ["127.0.0.9"])
    assert max(found) <= most


async def test_authenticated_pods_of_one_address_are_not_limited(
    port: int, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "MOST_OF_ADDRESS", 4)
    ends = [await connect(port, trusted, "127.0.0.9") for _ in range(1)]
    assert await post(ends[0], "pod-0") == 200
    for number in range(1, 12):
        ends.append(await connect(port, trusted, "127.0.0.9"))
        assert await post(ends[number], f"pod-{number}") == 200
    assert [await post(each, f"pod-{number}") for number, each in enumerate(ends)] == [200] * 12, "none was closed"
    for _, writer in ends:
        writer.close()


async def test_connection_closes_after_a_rejected_report(port: int, trusted: ssl.SSLContext) -> None:
    ends = await connect(port, trusted, "127.0.0.9")
    assert await post(ends, "forged") == 401
    async with asyncio.timeout(listener.IDLE_SECONDS / 3):
        assert await ends[0].read() == b""


async def test_unauthenticated_connection_is_closed_after_its_time(
    port: int, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the stranger keeps sending."""
    monkeypatch.setattr(listener, "AUTHENTICATION_SECONDS", 0.2)
    reader, writer = await connect(port, trusted, "127.0.0.9")
    begun = time.monotonic()
    writer.write(f"POST {REPORT_PATH} HTTP/1.1\r\n".encode())

    async def keep_sending() -> None:
        while True:
            writer.write(b"X: y\r\n")
            await asyncio.sleep(0.02)

    with cancel_afterwards(asyncio.create_task(keep_sending())):
        async with asyncio.timeout(60):
            with suppress(OSError):
                await reader.read()
    assert time.monotonic() - begun >= 0.1
    writer.close()


async def test_pod_has_one_connection(port: int, trusted: ssl.SSLContext) -> None:
    first, second = [await connect(port, trusted, "127.0.0.9") for _ in range(2)]
    assert await post(first, "pod-1") == 200
    assert await post(second, "pod-1") == 200
    assert await first[0].read() == b"", "the newer one is the pod's"
    assert await post(second, "pod-1") == 200
    second[1].close()


async def test_most_silent_pod_loses_its_connection_when_there_are_too_many(
    authority: Authority, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "MOST_CONNECTIONS", 2)
    report_store = ReportStore()
    report_store.follow(JOB, ALLOWED_PODS)
    async with run_endpoint(Reports(KnownPods(), report_store), make_tls_context(authority), 0) as port:
        ends = [await connect(port, trusted, "127.0.0.9") for _ in range(3)]
        for number in (0, 1, 0, 2):
            assert await post(ends[number], f"pod-{number}") == 200
        assert await ends[1][0].read() == b""
        assert [await post(ends[number], f"pod-{number}") for number in (0, 2)] == [200, 200]
        for _, writer in ends:
            writer.close()


async def test_failed_handshake_of_an_untrusting_client_is_counted(port: int) -> None:
    def count_failed_handshakes() -> float:
        name = "pseudoreal_report_handshakes_failed_total"
        return REGISTRY.get_sample_value(name, {"reason": "untrusted"}) or 0.0

    def start_handshake() -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection, suppress(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(connection, server_hostname=HOST)

    before = count_failed_handshakes()
    await asyncio.to_thread(start_handshake)
    async with asyncio.timeout(60):
        while count_failed_handshakes() == before:
            await asyncio.sleep(0.01)
    assert count_failed_handshakes() == before + 1
