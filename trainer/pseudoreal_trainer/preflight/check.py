"""Preflight check of one rank. Rank 0 also collects the results of all ranks and makes the diagnosis."""

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import DistStoreError, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from pseudoreal_trainer.preflight import probes
from pseudoreal_trainer.preflight.diagnosis import (
    Diagnosis,
    Nodes,
    PairResult,
    RankResult,
    diagnose,
    diagnose_silent_leader,
    diagnose_start,
)
from pseudoreal_trainer.preflight.pairs import Pairing, pairings


def connect(seconds: float, *, holds: bool = False) -> Store:
    """Connect to the store at MASTER_ADDR. `holds`: this process is the store's server. Raises torch's errors."""
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=holds,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )
    return part_of(store, "preflight", seconds)


def part_of(store: Store, name: str, seconds: float) -> Store:
    """Return a view of the store with the prefix `name` before each key. A read waits at most `seconds` for an
    entry."""
    part = PrefixStore(name, store)
    part.set_timeout(timedelta(seconds=seconds))
    return part


def is_held_by_torchrun() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


class ResultStore:
    """Exchange of nodes, results and the diagnosis between the ranks, through the store.

    No method waits longer than its `seconds`. After a timeout, a method returns False, None or fewer entries.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def begin(self, rank: int, node: str) -> None:
        self._store.set(f"node/{rank}", node)

    def nodes(self, ranks: Collection[int], seconds: float) -> Nodes:
        """Return rank -> node for the given ranks that have started; wait up to `seconds` for all of them."""
        found = self._wait_for_each("node", ranks, seconds)
        return {rank: self._store.get(f"node/{rank}").decode() for rank in found}

    def allow_measuring(self, is_complete: bool) -> None:
        """Publish whether the ranks may measure. `is_complete`: whether all ranks have started."""
        self._store.set("go", str(is_complete))

    def may_measure(self, seconds: float) -> bool:
        return self._wait(["go"], seconds) and self._store.get("go") == b"True"

    def answer(self, result: RankResult) -> None:
        self._store.set(f"result/{result.rank}", result.to_json())

    def results(self, ranks: Collection[int], seconds: float) -> list[RankResult]:
        found = self._wait_for_each("result", ranks, seconds)
        return [RankResult.model_validate_json(self._store.get(f"result/{rank}")) for rank in found]

    def publish(self, diagnosis: Diagnosis) -> None:
        self._store.set("diagnosis", diagnosis.to_json())

    def diagnosis(self, rank: int, seconds: float) -> Diagnosis | None:
        if not self._wait(["diagnosis"], seconds):
            return None
        diagnosis = Diagnosis.model_validate_json(self._store.get("diagnosis"))
        self._store.set(f"heard/{rank}", "")
        return diagnosis

    def wait_until_read(self, ranks: Collection[int], seconds: float) -> None:
        """Wait until the ranks have read the diagnosis, because the store may end with this process."""
        self._wait([f"heard/{rank}" for rank in ranks], seconds)

    def _wait_for_each(self, key: str, ranks: Collection[int], seconds: float) -> list[int]:
        """Return the ranks with an entry, after waiting up to `seconds` for all."""
        until = time.monotonic() + seconds
        return [rank for rank in ranks if self._wait([f"{key}/{rank}"], until - time.monotonic())]

    def _wait(self, keys: list[str], seconds: float) -> bool:
        if seconds <= 0:
            return bool(self._store.check(keys))
        try:
            self._store.wait(keys, timedelta(seconds=seconds))
        except DistStoreError:
            return False
        return True


_QUOTED = 200
"""Maximum number of characters quoted from an error."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, so generous that only a hang exceeds them."""

    start: float = 600.0
    """Limit for the start of all ranks: some may still be reading their corpus."""
    product: float = 60.0
    """Limit for the matrix products."""
    pairing: float = 20.0
    """Limit for each pairing."""
    answer: float = 10.0
    """Limit for an answer through the store."""


@dataclass(frozen=True)
class CheckedRank:
    """The rank checked by this process."""

    rank: int
    workers: int
    processes: int
    """Number of ranks per worker."""
    node: str
    device: Callable[[], torch.device]
    """Function that returns the rank's device. An error of the function becomes part of the rank's result."""

    @property
    def world(self) -> int:
        return self.workers * self.processes

    def pairings(self) -> list[Pairing | None]:
        return pairings(self.rank, self.workers, self.processes)

    def measuring(self, limits: Limits) -> float:
        """Return the time limit of all measurements together, in seconds."""
        return limits.product + len(self.pairings()) * limits.pairing


@dataclass
class _PartialResult:
    """Results so far of the measuring thread. Another thread reads the results here, because the measuring thread may
    hang."""

    product_seconds: float | None = None
    product_right: bool = False
    error: str = ""
    pair_results: list[PairResult] = field(default_factory=list)


def check(own: CheckedRank, limits: Limits) -> tuple[Diagnosis, list[RankResult]]:
    """Check this rank; return the diagnosis on all ranks, and the results of all ranks on rank 0. Every rank calls
    this.

    Raises torch's errors if the store is unreachable.
    """
    if own.world == 1:
        result = _measure_in_thread(own, limits)
        return diagnose({0: own.node}, [result], limits.product), [result]
    store = connect(limits.start, holds=own.rank == 0 and not is_held_by_torchrun())
    exchange = ResultStore(store)
    exchange.begin(own.rank, own.node)
    return _lead(own, exchange, limits) if own.rank == 0 else (_follow(own, exchange, limits), [])


def _lead(own: CheckedRank, exchange: ResultStore, limits: Limits) -> tuple[Diagnosis, list[RankResult]]:
    everybody = range(own.world)
    nodes = exchange.nodes(everybody, limits.start)
    diagnosis, results = diagnose_start(own.world, nodes, limits.start), list[RankResult]()
    exchange.allow_measuring(not diagnosis.broken)
    if not diagnosis.broken:
        until = time.monotonic() + own.measuring(limits) + limits.answer
        exchange.answer(_measure_in_thread(own, limits))
        results = exchange.results(everybody, until - time.monotonic())
        diagnosis = diagnose(nodes, results, own.measuring(limits) + limits.answer)
    exchange.publish(diagnosis)
    alive = [result.rank for result in results] or nodes
    exchange.wait_until_read([rank for rank in alive if rank != 0], limits.answer)
    return diagnosis, results


def _follow(own: CheckedRank, exchange: ResultStore, limits: Limits) -> Diagnosis:
    if exchange.may_measure(limits.start):
        exchange.answer(_measure_in_thread(own, limits))
    seconds = own.measuring(limits) + 2 * limits.answer
    return exchange.diagnosis(own.rank, seconds) or diagnose_silent_leader(exchange.nodes([0], 0), seconds)


def _measure_in_thread(own: CheckedRank, limits: Limits) -> RankResult:
    notes = _PartialResult()
    thread = threading.Thread(target=_measure, args=(own, limits, notes), daemon=True)
    thread.start()
    thread.join(own.measuring(limits))
    return RankResult(
        rank=own.rank,
        node=own.node,
        product_seconds=notes.product_seconds,
        product_right=notes.product_right,
        error=notes.error,
        pair_results=list(notes.pair_results),
    )


def _measure(own: CheckedRank, limits: Limits, notes: _PartialResult) -> None:
    begun = time.monotonic()
    try:
        # A separate connection: a read that waits for an absent partner must not block the answer on the main
        # connection.
        store = connect(limits.answer) if own.world > 1 else None
        device = own.device()
        notes.product_seconds, notes.product_right = probes.product(device)
    except Exception as error:
        notes.error = _quote(error)
        return
    for number, pairing in enumerate(own.pairings(), start=1):
        if pairing is not None and store is not None:
            # Both partners compute the same deadline, so a partner delayed by an earlier pairing can still join in
            # time.
            until = begun + limits.product + number * limits.pairing
            notes.pair_results.append(PairResult(network=pairing.network, partner=pairing.partner))
            notes.pair_results[-1] = _probe_pair(own, pairing, store, device, max(1.0, until - time.monotonic()))


def _probe_pair(own: CheckedRank, pairing: Pairing, store: Store, device: torch.device, seconds: float) -> PairResult:
    first, second = sorted((own.rank, pairing.partner))
    of_pair = part_of(store, f"{pairing.network}/{first}/{second}", seconds)
    spent, error = None, ""
    try:
        spent = probes.sums(of_pair, int(own.rank == second), device, seconds)
    except Exception as caught:
        error = _quote(caught)
    return PairResult(network=pairing.network, partner=pairing.partner, seconds=spent, error=error)


def _quote(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_QUOTED]
