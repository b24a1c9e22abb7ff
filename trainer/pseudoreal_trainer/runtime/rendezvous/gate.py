"""Worker 0's side of a rendezvous: gathers the workers, gives each its number, and lets their ranks reach the store.

Runs in an asyncio loop in a thread of its own. A peer without the key of the rendezvous is not counted, is told nothing
and does not reach the store. It can take slots for handshakes, for ten seconds each; when all are taken, the address
with the most slots loses its oldest.
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
    Left,
    Line,
    Stranger,
    answer_worker,
)
from pseudoreal_trainer.runtime.rendezvous.seats import Seat
from pseudoreal_trainer.runtime.rendezvous.tunnel import LOOPBACK, Address, accept, carry, connect

HANDSHAKES = 512
"""Most handshakes at a time."""
_LOG_SECONDS = 10.0
"""Seconds between two log lines about refused peers."""
_DESCRIPTORS = 2**20
"""Most file descriptors that this process asks for."""

log = structlog.get_logger()


@dataclass(frozen=True)
class Arrival:
    """A worker at the rendezvous. `process` tells apart two processes that come as the same worker."""

    seat: Seat
    process: str

    def to_text(self) -> bytes:
        return json.dumps({"process": self.process, "seat": asdict(self.seat)}).encode()

    @classmethod
    def from_text(cls, text: bytes, workers: int) -> "Arrival":
        """Parse the text of a worker. Raises Stranger if the text is invalid."""
        try:
            told = json.loads(text)
            arrival = cls(Seat(**told["seat"]), str(told["process"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Stranger("says what this release does not understand") from None
        worker = arrival.seat.worker
        if not isinstance(worker, int) or not 0 < worker < workers:
            raise Stranger(f"comes as worker {worker} of {workers}")
        return arrival


@dataclass(frozen=True)
class Answer:
    """Number of a worker, or the reason why it has none."""

    number: int = -1
    problem: str = ""
    is_over: bool = False
    """Whether the workers had met before this one came. If a queue replaces the pods of an execution, that was the
    rendezvous of the previous pods, and another one follows."""

    def to_text(self) -> bytes:
        return json.dumps({"number": self.number, "problem": self.problem[:500], "over": self.is_over}).encode()

    @classmethod
    def from_text(cls, text: bytes) -> "Answer":
        told = json.loads(text)
        return cls(told["number"], told["problem"], told["over"])


class _Guest:
    """A process at the rendezvous. It may connect again after its connection breaks."""

    def __init__(self, arrival: Arrival) -> None:
        self.seat, self.process = arrival.seat, arrival.process
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.lines = 0

    def tell(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class Gate:
    """Listener of one rendezvous. `store` is the port of the ranks' store on the loopback interface."""

    def __init__(self, listener: socket.socket, key: bytes, workers: int, store: int) -> None:
        listener.setblocking(False)
        self._listener, self._key, self._workers = listener, key, workers
        self._store: Address = (socket.AF_INET, (LOOPBACK, store))
        self._guests: dict[int, _Guest] = {}
        self._handshakes: dict[asyncio.Task[None], str] = {}
        """Handshakes in progress -> address of the peer, oldest first."""
        self._tasks = set[asyncio.Task[None]]()
        self._strangers = _Strangers()
        self.complete: Future[list[Seat]] = Future()
        """Seats of all other workers, once all have come."""
        self.moved = time.monotonic()
        """Time at which the last byte went to or from the store."""

    @property
    def missing(self) -> list[int]:
        return [worker for worker in range(1, self._workers) if worker not in self._guests]

    async def run(self) -> None:
        """Accept connections until cancelled."""
        _raise_descriptor_limit()
        while True:
            self._begin(*await accept(self._listener))

    async def answer(self, answers: Mapping[int, Answer]) -> None:
        """Send the workers their answers, by worker."""
        for worker, answer in answers.items():
            self._guests[worker].tell(answer)

    def _begin(self, connected: socket.socket, host: str) -> None:
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
            with closing(Line(connected)) as line:
                await self._serve_line(line)
        except Left:
            pass  # workers look whether worker 0 listens before they come
        except TimeoutError:
            self._strangers.note(host, f"has proven nothing within {HANDSHAKE_SECONDS:.0f} s")
        except Stranger as stranger:
            self._strangers.note(host, str(stranger))
        except OSError as error:
            log.info("connection_lost", peer=host, error=str(error))

    async def _serve_line(self, line: Line) -> None:
        async with asyncio.timeout(HANDSHAKE_SECONDS):
            purpose, seal = await answer_worker(line, self._key)
            self._handshakes.pop(_this_task(), None)
            if purpose == STORE:
                with closing(await connect(self._store)) as store:
                    await carry(line, store, self._note_move)
            elif purpose == MEET:
                arrival = Arrival.from_text(await seal.receive(), self._workers)
            else:
                raise Stranger(f"asks for {purpose!r}, which this release does not know")
        if purpose == MEET:
            await seal.send((await self._answer_for(line, arrival)).to_text())

    async def _answer_for(self, line: Line, arrival: Arrival) -> Answer:
        """Wait for the answer to a worker. Raises Left or OSError if its connection ends, Stranger if it sends more."""
        guest = self._seat(arrival)
        if guest is None:
            return Answer(is_over=True)
        guest.lines += 1
        left = asyncio.create_task(line.read(1))
        try:
            first: set[asyncio.Future[Any]] = {left, guest.answer}
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if guest.answer.done():
                return guest.answer.result()
            await left
            raise Stranger("says more than it was asked")
        finally:
            if not left.cancel() and not left.cancelled():
                left.exception()  # asyncio would log an exception that was never retrieved
            guest.lines -= 1
            self._unseat(guest)

    def _seat(self, arrival: Arrival) -> _Guest | None:
        """Count a worker; None: all have met already."""
        worker = arrival.seat.worker
        before = self._guests.get(worker)
        if before is not None and before.process == arrival.process:
            return before
        if self.complete.done():
            return None
        if before is not None:
            # The earlier process, whose pod may have been replaced, has to end: the two would come in turns forever.
            before.tell(Answer(problem=f"another pod has come as worker {worker}, at {arrival.seat.node}"))
        guest = self._guests[worker] = _Guest(arrival)
        if not self.missing:
            self.complete.set_result([self._guests[number].seat for number in range(1, self._workers)])
        return guest

    def _unseat(self, guest: _Guest) -> None:
        """Remove a worker whose connection broke before all had come."""
        is_here = guest.lines > 0 or self.complete.done()
        if not is_here and self._guests.get(guest.seat.worker) is guest:
            del self._guests[guest.seat.worker]

    def _note_move(self) -> None:
        self.moved = time.monotonic()


class _Strangers:
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
    assert task is not None, "coroutines of a gate run in tasks"
    return task


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors: each connection of a rank takes three, and some container runtimes give 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, most))
