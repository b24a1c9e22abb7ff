"""torchrun's rendezvous, in place of torch's own, which unpickles entries of a store that everybody can write to.

Workers are known by number, and meet at worker 0. Only the listener of `Gate` is open to the network. torch's store,
which serves every client, listens on the loopback interface.
"""

import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import structlog
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from pseudoreal_trainer.runtime.rendezvous.background import Background
from pseudoreal_trainer.runtime.rendezvous.gate import Answer, Gate
from pseudoreal_trainer.runtime.rendezvous.guest import come
from pseudoreal_trainer.runtime.rendezvous.seats import Seat
from pseudoreal_trainer.runtime.rendezvous.tunnel import BACKLOG, LOOPBACK, lead_to_store

BACKEND = "pseudoreal"
"""Name by which torchrun knows this rendezvous."""
T = TypeVar("T")
Numbering = Callable[[Sequence[Seat]], Sequence[int]]
"""Returns a number for each worker, from the seats of all workers in order."""
_DEFAULT_SECONDS = 600
_LOG_SECONDS = 60.0
_STORE_SECONDS = 60.0
"""Default time limit of a request to the store."""
_QUIET_SECONDS, _MOST_QUIET_SECONDS = 0.05, 2.0
"""Seconds without traffic after which the store ends, and the longest wait for such a pause."""

log = structlog.get_logger()


class StaticRendezvous(RendezvousHandler):
    """Rendezvous of `parameters.max_nodes` workers; it takes place once. `seat`: the worker of this process. `key`:
    None for a worker that is the only one."""

    def __init__(
        self, parameters: RendezvousParameters, seat: Seat, numbering: Numbering, key: bytes | None = None
    ) -> None:
        self._parameters, self._seat, self._numbering, self._key = parameters, seat, numbering, key
        self._workers = parameters.max_nodes
        self._background: Background | None = None
        self._gate: Gate | None = None
        self._store: TCPStore | None = None
        """Kept here, because worker 0's server ends with this object."""

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return str(self._parameters.run_id)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no worker can come later."""

    def num_nodes_waiting(self) -> int:
        return 0

    def next_rendezvous(self) -> RendezvousInfo:
        if self._seat.worker == 0:
            store, number = self._hold()
        else:
            store, number = self._come()
        self._store = store
        return RendezvousInfo(store, number, self._workers, RendezvousStoreInfo(LOOPBACK, store.port))

    def shutdown(self) -> bool:
        """Close the rendezvous once the other workers have the answers to their last requests to the store."""
        if self._gate is not None:
            until = time.monotonic() + _MOST_QUIET_SECONDS
            while time.monotonic() < min(until, self._gate.moved + _QUIET_SECONDS):
                time.sleep(_QUIET_SECONDS / 5)
        if self._background is not None:
            self._background.close()
            self._background = None
        return True

    def _hold(self) -> tuple[TCPStore, int]:
        """Run worker 0's side. Return the ranks' store, and this worker's number."""
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        port = listener.getsockname()[1]
        store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            master_listen_fd=listener.detach(),
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
        )
        if self._workers == 1:
            return store, 0
        door = _listen(self._endpoint[1])
        self._gate = Gate(door, self._required_key, self._workers, port)
        background = self._begin()
        background.begin(self._gate.run())
        return store, self._give_numbers(background, self._gate)

    def _give_numbers(self, background: Background, gate: Gate) -> int:
        def missing() -> str:
            return f"of {self._workers} workers these have not come: {_listed(gate.missing)}"

        others = self._await(gate.complete, missing)
        seats = [self._seat, *others]
        try:
            answers = [Answer(number) for number in self._numbering(seats)]
        except ValueError as error:
            # Every worker that waits for an answer gets one.
            answers = [Answer(problem=str(error))] * len(seats)
        background.begin(gate.answer(dict(enumerate(answers[1:], start=1))))
        return _number(answers[0])

    def _come(self) -> tuple[TCPStore, int]:
        """Run another worker's side. Return a client of the ranks' store, and this worker's number."""
        key, background = self._required_key, self._begin()
        coming = background.begin(come(self._endpoint, key, self._seat))
        answer, worker_0 = self._await(coming, lambda: "worker 0 has not given this worker a number")
        number = _number(answer)
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        background.begin(lead_to_store(listener, worker_0, key))
        limit = timedelta(seconds=_STORE_SECONDS)
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=limit), number

    def _begin(self) -> Background:
        self._background = Background()
        return self._background

    def _await(self, awaited: "Future[T]", lack: Callable[[], str]) -> T:
        until = time.monotonic() + (self._parameters.get_as_int("join_timeout") or _DEFAULT_SECONDS)
        while True:
            try:
                return awaited.result(max(0.0, min(_LOG_SECONDS, until - time.monotonic())))
            except TimeoutError:
                if time.monotonic() >= until:
                    raise RendezvousTimeoutError(lack()) from None
                log.info("waits_for_workers", because=lack())

    @property
    def _endpoint(self) -> tuple[str, int]:
        host, _, port = self._parameters.endpoint.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def _required_key(self) -> bytes:
        assert self._key is not None, "every rendezvous of several workers has a key"
        return self._key


def static(seat: Seat, numbering: Numbering, key: bytes | None) -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of handlers that torchrun calls for BACKEND."""
    return lambda parameters: StaticRendezvous(parameters, seat, numbering, key)


def _number(answer: Answer) -> int:
    if answer.problem:
        raise RuntimeError(f"the workers have no numbers: {answer.problem}")
    return answer.number


def _listen(port: int) -> socket.socket:
    """Listen on a port of all interfaces. Raises RendezvousConnectionError."""
    dual = socket.has_dualstack_ipv6()
    try:
        return socket.create_server(
            ("", port), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=BACKLOG, dualstack_ipv6=dual
        )
    except OSError as error:
        raise RendezvousConnectionError(f"worker 0 cannot hold the meeting at port {port}: {error}") from error


def _listed(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:20]))
    return shown if len(workers) <= 20 else f"{shown} and {len(workers) - 20} more"
