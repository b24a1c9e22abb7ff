"""Worker 0's side of a rendezvous: gathers the workers, gives each its number, and lets their ranks reach the store.

Runs in the asyncio loop of a `LoopThread`. A peer without the key of the rendezvous is not counted, learns nothing and
cannot reach the store. Such a peer can occupy slots for handshakes, for ten seconds each. If all slots are taken, the
next connection cancels the oldest handshake of the address with the most slots.
"""

import asyncio
import json
import resource
import socket
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from pseudoreal_trainer.runtime.rendezvous.handshake import (
    HANDSHAKE_SECONDS,
    MEET,
    STORE,
    Connection,
    PeerLeft,
    PeerRejected,
    answer_worker,
)
from pseudoreal_trainer.runtime.rendezvous.tunnel import LOOPBACK, Address, accept, connect, relay
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription

HANDSHAKES = 512
"""Maximum number of handshakes in progress at a time."""
_LOG_SECONDS = 10.0
"""Seconds between two log lines about refused peers."""
_DESCRIPTORS = 2**20
"""Number of file descriptors to which this process raises its limit, if permitted."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Arrival:
    """A worker at the rendezvous. `process`: random id, to distinguish two processes with the same worker index."""

    description: WorkerDescription
    process: str

    def to_text(self) -> bytes:
        return json.dumps({"process": self.process, "seat": asdict(self.description)}).encode()

    @classmethod
    def from_text(cls, text: bytes, workers: int) -> "Arrival":
        """Parse the text of a worker. Raises PeerRejected if the text is invalid."""
        try:
            told = json.loads(text)
            arrival = cls(WorkerDescription(**told["seat"]), str(told["process"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise PeerRejected("says what this release does not understand") from None
        worker = arrival.description.worker
        if not isinstance(worker, int) or not 0 < worker < workers:
            raise PeerRejected(f"comes as worker {worker} of {workers}")
        return arrival


@dataclass(frozen=True)
class Answer:
    """Answer of worker 0: the number of a worker, or the reason why the worker has none."""

    number: int = -1
    problem: str = ""
    is_over: bool = False
    """Whether the workers had met before this worker connected. The workers that met may be the previous pods of the
    execution, replaced by a queue: another rendezvous then follows."""

    def to_text(self) -> bytes:
        return json.dumps({"number": self.number, "problem": self.problem[:500], "over": self.is_over}).encode()

    @classmethod
    def from_text(cls, text: bytes) -> "Answer":
        told = json.loads(text)
        return cls(told["number"], told["problem"], told["over"])


class _Member:
    """A process at the rendezvous. After a broken connection, the process may connect again."""

    def __init__(self, arrival: Arrival) -> None:
        self.description, self.process = arrival.description, arrival.process
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.connections = 0

    def tell(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class RendezvousServer:
    """Worker 0's server of one rendezvous: sends the workers their numbers, and relays their connections to the store.
    `store`: port of the ranks' store on the loopback interface."""

    def __init__(self, listener: socket.socket, key: bytes, workers: int, store: int) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._workers = listener, key, workers
        self._store: Address = (socket.AF_INET, (LOOPBACK, store))
        self._members: dict[int, _Member] = {}
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Handshakes in progress -> address of the peer, oldest first."""
        self._tasks = set[asyncio.Task[None]]()
        self._rejections = _Rejections()
        self.complete: Future[list[WorkerDescription]] = Future()
        """Descriptions of workers 1, 2, ..., set once all of them have connected."""
        self.moved = time.monotonic()
        """Time of the last transfer to or from the store, in seconds of time.monotonic."""

    @property
    def missing(self) -> list[int]:
        return [worker for worker in range(1, self._workers) if worker not in self._members]

    async def run(self) -> None:
        """Accept connections until cancelled."""
        _raise_descriptor_limit()
        while True:
            self._start_handshake(*await accept(self._listener))

    async def answer(self, answers: Mapping[int, Answer]) -> None:
        """Send the answers. `answers`: worker index -> answer.

        A coroutine, because only the loop's thread may set the futures.
        """
        for worker, answer in answers.items():
            self._members[worker].tell(answer)

    def _start_handshake(self, connected: socket.socket, host: str) -> None:
        if len(self._handshakes) >= HANDSHAKES:
            most, _ = Counter(self._handshakes.values()).most_common(1)[0]
            oldest = next(task for task, peer in self._handshakes.items() if peer == most)
            del self._handshakes[oldest]
            oldest.cancel()
        task = asyncio.create_task(self._serve(connected, host))
        self._handshakes[task] = host
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _serve(self, connected: socket.socket, host: str) -> None:
        try:
            with closing(Connection(connected)) as connection:
                await self._serve_connection(connection)
        except PeerLeft:
            pass  # `await_worker_0` connects and leaves, to find out whether worker 0 listens
        except TimeoutError:
            self._rejections.note(host, f"has proven nothing within {HANDSHAKE_SECONDS:.0f} s")
        except PeerRejected as stranger:
            self._rejections.note(host, str(stranger))
        except OSError as error:
            log.info("connection_lost", peer=host, error=str(error))

    async def _serve_connection(self, connection: Connection) -> None:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            purpose, texts = await answer_worker(connection, self._key)
            self._handshakes.pop(_this_task(), None)
            if purpose == STORE:
                with closing(await connect(self._store)) as store:
                    await relay(connection, store, self._note_move)
            elif purpose == MEET:
                arrival = Arrival.from_text(await texts.receive(), self._workers)
            else:
                raise PeerRejected(f"asks for {purpose!r}, which this release does not know")
        if purpose == MEET:
            await texts.send((await self._answer_for(connection, arrival)).to_text())

    async def _answer_for(self, connection: Connection, arrival: Arrival) -> Answer:
        """Wait until the worker's answer is known, and return it.

        Raises PeerLeft or OSError if the connection ends, and PeerRejected if the worker sends anything before the
        answer.
        """
        member = self._add_member(arrival)
        if member is None:
            return Answer(is_over=True)
        member.connections += 1
        left = asyncio.create_task(connection.read(1))
        try:
            first: set[asyncio.Future[Any]] = {left, member.answer}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if member.answer.done():
                return member.answer.result()
            await left
            raise PeerRejected("says more than it was asked")
        finally:
            if not left.cancel() and not left.cancelled():
                left.exception()  # asyncio would log an exception that was never retrieved
            member.connections -= 1
            self._remove_member(member)

    def _add_member(self, arrival: Arrival) -> _Member | None:
        """Return the member for an arrival: a new one, or the existing one if the same process connects again. None:
        all workers have met, with another process as this worker."""
        worker = arrival.description.worker
        before = self._members.get(worker)
        if before is not None and before.process == arrival.process:
            return before
        if self.complete.done():
            return None
        if before is not None:
            # The pod of the earlier process may have been replaced. Tell the earlier process to end: otherwise both
            # would keep reconnecting, and replace each other forever.
            before.tell(Answer(problem=f"another pod has come as worker {worker}, at {arrival.description.node}"))
        member = self._members[worker] = _Member(arrival)
        if not self.missing:
            self.complete.set_result([self._members[number].description for number in range(1, self._workers)])
        return member

    def _remove_member(self, member: _Member) -> None:
        """Remove the worker if it has no connection left, unless all workers have met."""
        is_here = member.connections > 0 or self.complete.done()
        if not is_here and self._members.get(member.description.worker) is member:
            del self._members[member.description.worker]

    def _note_move(self) -> None:
        self.moved = time.monotonic()


class _Rejections:
    """Logs refused peers, at a limited rate."""

    def __init__(self) -> None:
        self._count, self._said = 0, float("-inf")

    def note(self, host: str, what: str) -> None:
        self._count += 1
        if time.monotonic() - self._said >= _LOG_SECONDS:
            log.warning("stranger_refused", peer=host, because=f"it {what}", count=self._count)
            self._count, self._said = 0, time.monotonic()


def _this_task() -> "asyncio.Task[None]":
    task = asyncio.current_task()
    assert task is not None, "coroutines of the server run in tasks"
    return task


def _raise_descriptor_limit() -> None:
    """Raise the limit of file descriptors: each connection of a rank takes three, and some container runtimes allow
    1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
