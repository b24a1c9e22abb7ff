"""torchrun with the project's own rendezvous. torch's own rendezvous is not used: it unpickles entries of a store, and
anyone on the network can write to that store.

Workers are identified by index, and meet at worker 0. Only the listener of `RendezvousServer` is open to the network.
torch's store serves every client, so the store listens only on the loopback interface.
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import structlog
from pseudoreal_api.resolved.config import read_phase_config
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from pseudoreal_trainer.logs import configure_logs
from pseudoreal_trainer.runtime.rendezvous.client import join_rendezvous
from pseudoreal_trainer.runtime.rendezvous.identity import rendezvous_key
from pseudoreal_trainer.runtime.rendezvous.server import Answer, RendezvousServer
from pseudoreal_trainer.runtime.rendezvous.tunnel import BACKLOG, LOOPBACK, forward_to_store
from pseudoreal_trainer.runtime.rendezvous.workers import WorkerDescription, group_ranks

T = TypeVar("T")


class LoopThread:
    """An asyncio loop in a daemon thread. The loop serves connections while the main thread works.

    The state of a `RendezvousServer` belongs to this thread, so the state needs no lock: the main thread submits
    coroutines, and otherwise only reads.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="rendezvous", daemon=True)
        self._thread.start()

    def begin(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel all tasks and end the thread."""
        with suppress(Exception):
            self.begin(_cancel_all()).result(5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


BACKEND = "pseudoreal"
"""Name by which torchrun knows this rendezvous."""
AssignGroupRanks = Callable[[Sequence[WorkerDescription]], Sequence[int]]
"""Function: descriptions of all workers, by worker index -> group rank of each worker, in the same order."""
_DEFAULT_SECONDS = 600
_LOG_SECONDS = 60.0
_STORE_SECONDS = 60.0
"""Default time limit of a request to the store."""
_QUIET_SECONDS, _MOST_QUIET_SECONDS = 0.05, 2.0
"""Seconds without traffic after which worker 0 closes its tunnels, and maximum number of seconds to wait until then."""

log = structlog.get_logger()


class StaticRendezvous(RendezvousHandler):
    """A single rendezvous of `parameters.max_nodes` workers.

    `description`: description of this process's worker. `key`: key of the rendezvous; None for a single worker.
    """

    def __init__(
        self,
        parameters: RendezvousParameters,
        description: WorkerDescription,
        assign: AssignGroupRanks,
        key: bytes | None = None,
    ) -> None:
        self._parameters, self._description, self._assign, self._key = parameters, description, assign, key
        self._workers = parameters.max_nodes
        self._background: LoopThread | None = None
        self._gate: RendezvousServer | None = None
        self._store: TCPStore | None = None
        """The ranks' store: server on worker 0, client elsewhere. None before the rendezvous. Kept because worker 0's
        server ends when the TCPStore is freed."""

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
        """Do nothing: a complete rendezvous accepts no further workers."""

    def num_nodes_waiting(self) -> int:
        return 0

    def next_rendezvous(self) -> RendezvousInfo:
        if self._description.worker == 0:
            store, number = self._run_worker_0()
        else:
            store, number = self._join_worker_0()
        self._store = store
        return RendezvousInfo(store, number, self._workers, RendezvousStoreInfo(LOOPBACK, store.port))

    def shutdown(self) -> bool:
        """Close the rendezvous once the other workers have the answers to their last requests to the store."""
        # The tunnels carry these answers, so the tunnels close last. The end of a request cannot be seen here: wait
        # until the tunnels have been silent for a moment.
        if self._gate is not None:
            until = time.monotonic() + _MOST_QUIET_SECONDS
            while time.monotonic() < min(until, self._gate.moved + _QUIET_SECONDS):
                time.sleep(_QUIET_SECONDS / 5)
        if self._background is not None:
            self._background.close()
            self._background = None
        return True

    def _run_worker_0(self) -> tuple[TCPStore, int]:
        """Run worker 0's side. Return the ranks' store, and this worker's number."""
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        port = listener.getsockname()[1]
        # The store takes over the listener: no other process can get the port in between.
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
        self._gate = RendezvousServer(door, self._required_key, self._workers, port)
        background = self._start_loop()
        background.begin(self._gate.run())
        return store, self._assign_group_ranks(background, self._gate)

    def _assign_group_ranks(self, background: LoopThread, gate: RendezvousServer) -> int:
        def missing() -> str:
            return f"of {self._workers} workers these have not come: {_list_workers(gate.missing)}"

        others = self._await(gate.complete, missing)
        descriptions = [self._description, *others]
        try:
            answers = [Answer(number) for number in self._assign(descriptions)]
        except ValueError as error:
            # Send the problem to all workers: each of them waits for an answer.
            answers = [Answer(problem=str(error))] * len(descriptions)
        background.begin(gate.answer(dict(enumerate(answers[1:], start=1))))
        return _group_rank_of(answers[0])

    def _join_worker_0(self) -> tuple[TCPStore, int]:
        """Run another worker's side. Return a client of the ranks' store, and this worker's number."""
        key, background = self._required_key, self._start_loop()
        coming = background.begin(join_rendezvous(self._endpoint, key, self._description))
        answer, worker_0 = self._await(coming, lambda: "worker 0 has not given this worker a number")
        number = _group_rank_of(answer)
        listener = socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        listener.setblocking(False)
        port = listener.getsockname()[1]
        background.begin(forward_to_store(listener, worker_0, key))
        limit = timedelta(seconds=_STORE_SECONDS)
        return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=limit), number

    def _start_loop(self) -> LoopThread:
        self._background = LoopThread()
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


def static(
    description: WorkerDescription, assign: AssignGroupRanks, key: bytes | None
) -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the factory of handlers that torchrun calls for BACKEND."""
    return lambda parameters: StaticRendezvous(parameters, description, assign, key)


def _group_rank_of(answer: Answer) -> int:
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


def _list_workers(workers: Sequence[int]) -> str:
    shown = ", ".join(map(str, workers[:20]))
    return shown if len(workers) <= 20 else f"{shown} and {len(workers) - 20} more"


def run(arguments: Sequence[str]) -> None:
    """Run torchrun with these arguments. The last argument is the phase's configuration file."""
    configure_logs()
    config = read_phase_config(Path(arguments[-1]))
    meets = int(os.environ.get("PET_NNODES", "1")) > 1
    # All workers have equally many ranks, so the numbers of the ranks follow from the numbers of the workers. Without
    # TORCH_ELASTIC_WORKER_IDENTICAL, torchrun would exchange the counts of ranks through the store.
    os.environ |= {"PET_RDZV_BACKEND": BACKEND, "TORCH_ELASTIC_WORKER_IDENTICAL": "1"}
    create = static(
        WorkerDescription.of_pod(), partial(group_ranks, config=config), rendezvous_key() if meets else None
    )
    rendezvous_handler_registry.register(BACKEND, create)
    main([*arguments])
