"""Preflight check of one rank. Rank 0 leads: it collects the findings of all ranks and judges them."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.distributed.distributed_c10d import Store

from pseudoreal_trainer.preflight import measure
from pseudoreal_trainer.preflight.board import Board, connect, is_held_by_torchrun, part_of
from pseudoreal_trainer.preflight.findings import Finding, Talk, Verdict
from pseudoreal_trainer.preflight.judge import judge, judge_silent_leader, judge_start
from pseudoreal_trainer.preflight.pairs import Pairing, pairings

_QUOTED = 200
"""Maximal number of characters quoted from an error."""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds, generous enough: only a hang exceeds them."""

    start: float = 600.0
    """Limit until all ranks have started: some may still be reading their corpus."""
    product: float = 60.0
    pairing: float = 20.0
    answer: float = 10.0
    """Limit for an answer through the store."""


@dataclass(frozen=True)
class Self:
    """The rank checked by this process."""

    rank: int
    workers: int
    processes: int
    node: str
    device: Callable[[], torch.device]
    """Function returning the rank's device. Its TrainingError, for a device other than the pod requested, becomes a
    finding."""

    @property
    def world(self) -> int:
        return self.workers * self.processes

    def pairings(self) -> list[Pairing | None]:
        return pairings(self.rank, self.workers, self.processes)

    def measuring(self, limits: Limits) -> float:
        """Return the maximal seconds for all measurements."""
        return limits.product + len(self.pairings()) * limits.pairing


@dataclass
class _Notes:
    """Notes of the measuring thread. The thread may hang; the results so far stay readable here."""

    product_seconds: float | None = None
    product_right: bool = False
    error: str = ""
    talks: list[Talk] = field(default_factory=list)


def check(own: Self, limits: Limits) -> tuple[Verdict, list[Finding]]:
    """Check this rank; return the verdict on all ranks, and on rank 0 the findings too. Every rank calls this.

    Raises torch's errors if the store is unreachable.
    """
    if own.world == 1:
        finding = _measured(own, limits)
        return judge({0: own.node}, [finding], limits.product), [finding]
    store = connect(limits.start, holds=own.rank == 0 and not is_held_by_torchrun())
    board = Board(store)
    board.begin(own.rank, own.node)
    return _lead(own, board, limits) if own.rank == 0 else (_follow(own, board, limits), [])


def _lead(own: Self, board: Board, limits: Limits) -> tuple[Verdict, list[Finding]]:
    everybody = range(own.world)
    nodes = board.nodes(everybody, limits.start)
    verdict, findings = judge_start(own.world, nodes, limits.start), list[Finding]()
    board.go(not verdict.broken)
    if not verdict.broken:
        until = time.monotonic() + own.measuring(limits) + limits.answer
        board.answer(_measured(own, limits))
        findings = board.findings(everybody, until - time.monotonic())
        verdict = judge(nodes, findings, own.measuring(limits) + limits.answer)
    board.publish(verdict)
    alive = [finding.rank for finding in findings] or nodes
    board.wait_until_heard([rank for rank in alive if rank != 0], limits.answer)
    return verdict, findings


def _follow(own: Self, board: Board, limits: Limits) -> Verdict:
    if board.may_go(limits.start):
        board.answer(_measured(own, limits))
    seconds = own.measuring(limits) + 2 * limits.answer
    return board.verdict(own.rank, seconds) or judge_silent_leader(board.nodes([0], 0), seconds)


def _measured(own: Self, limits: Limits) -> Finding:
    notes = _Notes()
    thread = threading.Thread(target=_measure, args=(own, limits, notes), daemon=True)
    thread.start()
    thread.join(own.measuring(limits))
    return Finding(
        rank=own.rank,
        node=own.node,
        product_seconds=notes.product_seconds,
        product_right=notes.product_right,
        error=notes.error,
        talks=list(notes.talks),
    )


def _measure(own: Self, limits: Limits, notes: _Notes) -> None:
    begun = time.monotonic()
    try:
        # A connection of its own: a read that waits in vain on it must not block the answer on the main connection.
        store = connect(limits.answer) if own.world > 1 else None
        device = own.device()
        notes.product_seconds, notes.product_right = measure.product(device)
    except Exception as error:
        notes.error = _words(error)
        return
    for number, pairing in enumerate(own.pairings(), start=1):
        if pairing is not None and store is not None:
            # Both partners compute this deadline alike, so a partner that an earlier pairing delayed can still join in
            # time.
            until = begun + limits.product + number * limits.pairing
            notes.talks.append(Talk(network=pairing.network, partner=pairing.partner))
            notes.talks[-1] = _talk(own, pairing, store, device, max(1.0, until - time.monotonic()))


def _talk(own: Self, pairing: Pairing, store: Store, device: torch.device, seconds: float) -> Talk:
    first, second = sorted((own.rank, pairing.partner))
    of_pair = part_of(store, f"{pairing.network}/{first}/{second}", seconds)
    spent, error = None, ""
    try:
        spent = measure.sums(of_pair, int(own.rank == second), device, seconds)
    except Exception as caught:
        error = _words(caught)
    return Talk(network=pairing.network, partner=pairing.partner, seconds=spent, error=error)


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:_QUOTED]
