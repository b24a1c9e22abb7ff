"""All-to-all exchanges of rows between expert-parallel ranks. Main thread only.

A rank that has all experts of a layer exchanges rows with itself: the rows stay where they are.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.trace import Trace
from pseudoreal_trainer.plan.records import Count, Exchange, Leg

_TO_EXPERTS = (Leg.DISPATCH, Leg.DISPATCH_AGAIN, Leg.COMBINE_GRADIENT)


@dataclass(frozen=True)
class RowCounts:
    """Row counts of one micro-batch, from the point of view of this rank."""

    of_experts: tuple[int, ...]
    """Rows that this rank sends to each of the layer's experts, [experts]."""
    sent: tuple[int, ...]
    """Rows that this rank sends to each rank, [expert ranks]."""
    arriving: tuple[int, ...]
    """Rows that this rank receives from each rank, [expert ranks]."""
    of_own: tuple[int, ...]
    """Rows that each of this rank's experts receives, [own experts]."""
    table: Tensor
    """Rows from each rank for each own expert, [expert ranks, own experts], on the device."""


@dataclass(frozen=True)
class _PendingExchange:
    """An exchange in flight."""

    rows: Tensor
    """Receive buffer, [received rows, width]."""
    work: dist.Work | None
    """Pending all-to-all; None: the rows are on this rank already."""
    sent: Tensor
    """Send buffer, which must stay alive and unchanged until the exchange is done."""
    begin: int
    """Start of the exchange, in nanoseconds of time.perf_counter_ns."""


class ExpertExchanges:
    """Starts all-to-all exchanges of rows, and holds the exchanges that are not used yet.

    All ranks of a group call the methods in plan order: the exchanges of a group are in flight at the same time, and
    the backend matches them by their order alone.
    """

    def __init__(self, groups: ProcessGroups, trace: Trace) -> None:
        self._groups, self._group, self._trace = groups, groups.expert, trace
        self._heartbeat = groups.ranks.heartbeat
        self._own = groups.layout.mesh.expert_coordinate(groups.ranks.rank)
        self._pending: dict[Exchange, _PendingExchange] = {}

    def exchange_counts(self, record: Count, counts: Tensor) -> list[RowCounts]:
        """Exchange row counts with the other expert ranks. Return the counts of each micro-batch.

        `counts`: rows of this rank's tokens, [micro-batches, experts]. The host waits for the device here, once for all
        micro-batches of the record.
        """
        ranks = self._groups.layout.expert_ranks
        sent = counts.unflatten(-1, (ranks, -1)).transpose(0, 1).contiguous()  # [ranks, micro-batches, own experts]
        arriving = sent if self._group is None else torch.empty_like(sent)
        begin = time.perf_counter_ns()
        with self._heartbeat.waiting(f"counts the tokens of experts at position {record.position}"):
            if self._group is not None:
                dist.all_to_all_single(arriving, sent, group=self._group)
            on_host = torch.stack([sent, arriving]).cpu()
        self._trace.add("exchange", begin, record)
        self._trace.count_bytes("experts", sent.nbytes - sent[0].nbytes)
        return [_row_counts(on_host[:, :, m], arriving[:, m]) for m in range(record.micro_batches)]

    def groups_with_rows(self, record: Count, counts: Sequence[RowCounts]) -> list[bool]:
        """Return for each group of this rank's experts whether it gets rows in any of the micro-batches.

        With sharded state, the ranks with the same experts gather a group together. The result is then the same on all
        of them: whether any of these ranks has rows for the group.
        """
        of_own = torch.tensor([one.of_own for one in counts]).sum(dim=0)
        rows = of_own.unflatten(0, (self._groups.layout.expert_groups, -1)).sum(dim=1)  # [groups]
        group = self._groups.same_experts
        if group is not None and self._groups.layout.sharding != "None":
            rows = rows.to(self._groups.device)
            with self._heartbeat.waiting(f"agrees on the groups of experts at position {record.position}"):
                dist.all_reduce(rows, group=group)
            self._trace.count_bytes("experts", 2 * (group.size() - 1) * rows.nbytes // group.size())
        return [number > 0 for number in rows.tolist()]

    def start(self, record: Exchange, rows: Tensor, counts: RowCounts) -> None:
        """Start to exchange rows, [rows to send, width], in the order of their destination ranks."""
        incoming, outgoing = counts.arriving, counts.sent
        if record.leg not in _TO_EXPERTS:
            incoming, outgoing = outgoing, incoming
        begin = time.perf_counter_ns()
        if self._group is None:
            self._pending[record] = _PendingExchange(rows, None, rows, begin)
            return
        here = rows.new_empty(sum(incoming), rows.shape[1])
        work = dist.all_to_all_single(here, rows, [*incoming], [*outgoing], group=self._group, async_op=True)
        self._pending[record] = _PendingExchange(here, work, rows, begin)
        others = len(rows) - outgoing[self._own]
        self._trace.count_bytes("experts", others * rows.shape[1] * rows.itemsize)

    def take(self, record: Exchange) -> Tensor:
        """Wait for the received rows and return them, [rows, width], in the order of their source ranks."""
        exchange = self._pending.pop(record)
        if exchange.work is not None:
            with self._heartbeat.waiting(f"exchanges tokens of position {record.position} ({record.leg.value})"):
                exchange.work.wait()
        self._trace.add("exchange", exchange.begin, record)
        return exchange.rows


def _row_counts(on_host: Tensor, table: Tensor) -> RowCounts:
    """Return the counts of one micro-batch. `on_host`: sent and arriving rows, [2, ranks, own experts of each rank]."""
    sent, arriving = on_host
    return RowCounts(
        of_experts=tuple(sent.flatten().tolist()),
        sent=tuple(sent.sum(dim=1).tolist()),
        arriving=tuple(arriving.sum(dim=1).tolist()),
        of_own=tuple(arriving.sum(dim=0).tolist()),
        table=table,
    )
