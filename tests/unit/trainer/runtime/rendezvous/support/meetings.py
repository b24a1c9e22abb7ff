"""Workers in threads of one process that rendezvous like torchrun's agents, and strangers at the port."""

import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import randrange

from pseudoreal_trainer.runtime.rendezvous.handler import BACKEND, AssignGroupRanks, StaticRendezvous
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from tests.support.patience import wait_for
from tests.support.ports import is_free

KEY = b"k" * 32


def by_worker(seats: Sequence[WorkerDescription]) -> list[int]:
    return [seat.worker for seat in seats]


def _port() -> int:
    """Return a free port outside of the ephemeral range. From an ephemeral port, a worker that is earlier than worker 0
    could be connected to itself."""
    while not is_free(port := randrange(20_000, 30_000)):
        pass
    return port


@dataclass
class Meeting:
    workers: int
    numbering: AssignGroupRanks = by_worker
    seconds: int = 60
    port: int = field(default_factory=_port)
    handlers: list[StaticRendezvous] = field(default_factory=list)

    def handler(self, worker: int, key: bytes | None = KEY) -> StaticRendezvous:
        parameters = RendezvousParameters(
            backend=BACKEND,
            endpoint=f"127.0.0.1:{self.port}",
            run_id="job-phase-1",
            min_nodes=self.workers,
            max_nodes=self.workers,
            join_timeout=str(self.seconds),
        )
        handler = StaticRendezvous(parameters, WorkerDescription(worker, f"node-{worker}", None), self.numbering, key)
        self.handlers.append(handler)
        return handler

    def await_door(self) -> None:
        wait_for("the door of worker 0", self._is_open, lambda: "it is not open")

    def missing(self) -> list[int]:
        """Return the workers that worker 0 still waits for. Its handler must be the first one made."""
        gate = self.handlers[0]._gate
        return [] if gate is None else gate.missing

    def _is_open(self) -> bool:
        try:
            self.call().close()
        except OSError:
            return False
        return True

    def call(self) -> socket.socket:
        """Connect to the port as a stranger can."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)


@contextmanager
def meeting(workers: int, numbering: AssignGroupRanks = by_worker, seconds: int = 60) -> Iterator[Meeting]:
    made = Meeting(workers, numbering, seconds)
    try:
        yield made
    finally:
        for handler in made.handlers:
            handler.shutdown()


Come = Callable[..., "Future[RendezvousInfo]"]


@contextmanager
def coming(held: Meeting) -> Iterator[Come]:
    """Yield a function that lets a worker join the rendezvous in a thread of its own."""
    with ThreadPoolExecutor(16) as threads:

        def come(worker: int, key: bytes | None = KEY) -> "Future[RendezvousInfo]":
            return threads.submit(held.handler(worker, key).next_rendezvous)

        yield come


def is_closed_by_peer(connected: socket.socket) -> bool:
    """Wait until the peer closes the connection, and drop everything received before."""
    try:
        while connected.recv(4096):
            pass
    except ConnectionError:
        pass
    return True
