"""Output of `pseudoreal plan`: tables and sentences for each phase."""

from collections.abc import Sequence
from itertools import groupby

from pseudoreal_api.quantity import readable_bytes
from rich.console import Console
from rich.table import Table

from pseudoreal_trainer.estimate.report import ImbalanceReport, PhaseReport, RankReport
from pseudoreal_trainer.estimate.schedule import PhaseDuration, changes_to_end_within
from pseudoreal_trainer.plan.effects import TRAFFIC, Traffic
from pseudoreal_trainer.plan.placement.flows import Exchange

_TRAFFIC_NAMES: dict[Traffic, str] = {
    "h2d": "host to device",
    "d2h": "device to host",
    "disk_read": "disk, read",
    "disk_write": "disk, write",
    "collective": "collectives, sent",
    "replicas": "between replicas, sent",
    "pipeline": "pipeline, sent",
    "experts": "tokens with experts, sent",
    "context": "keys and values, sent",
    "tensor": "between tensor ranks, sent",
}


EXCHANGES: dict[Exchange, str] = {
    "pipeline": "pipeline ranks",
    "shards": "shards",
    "replicas": "replicas",
    "experts": "tokens and their experts",
    "context": "parts of sequences",
    "tensor": "slices of layers",
}
"""Kind of exchange between ranks -> display name."""


def show(console: Console, report: PhaseReport) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    sharded = f"; stateSharding {report.state_sharding} over {report.data_ranks} data ranks"
    if report.context_ranks > 1:
        sharded += f"; sequences over {report.context_ranks} of them"
    if report.tensor_ranks > 1:
        sharded += f"; matrices of layers over {report.tensor_ranks} of them"
    say(
        f"phase {report.name}: {report.parameters:,} parameters, state of {report.parameters_per_rank:,} on a rank"
        f"{sharded if report.data_ranks > 1 else ''}"
    )
    console.print(_memory_table(report))
    if report.scratch_bytes is not None:
        say(
            f"kernels need up to {readable_bytes(report.scratch_bytes)} of device memory for their own use while a"
            " pass runs"
        )
    say(f"the loss is computed for {report.loss_chunk:,} tokens of a micro-batch at a time")
    console.print(_traffic_table(report))
    if report.exchanges:
        console.print(_exchange_table(report))
    say(
        f"per step, each unit is fetched at most {report.fetches_per_unit} times, and its gradient is reduced"
        f" {report.reductions_per_unit} times"
    )
    say(_step_text(report))
    if report.imbalance is not None:
        say(_imbalance_text(report.imbalance))
    for sentence in report.hints:
        say(f"hint: {sentence}")
    for sentence in report.reasons:
        say(f"does not fit: {sentence}")
    say("")


def show_course(console: Console, courses: Sequence[PhaseDuration], days: float | None) -> None:
    """Print the duration of each phase, and the time of its steps relative to the first phase. With `days`, also print
    the changes needed to end within this number of days."""
    table = Table("phase", "steps", "tokens", "seconds of a step", "times the first phase's", "days", title="the job")
    for column in table.columns[1:]:
        column.justify = "right"
    for course in courses:
        ratio = course.step_seconds / courses[0].step_seconds
        tokens = course.steps * course.tokens_per_step
        figures = (
            f"{course.steps:,}",
            f"{tokens:,}",
            f"{course.step_seconds:.4g}",
            f"{ratio:.3g}x",
            f"{course.days:.3g}",
        )
        table.add_row(course.name, *figures)
    console.print(table)
    for sentence in [] if days is None else changes_to_end_within(courses, days):
        console.print(sentence, highlight=False, markup=False, soft_wrap=True)


def _memory_table(report: PhaseReport) -> Table:
    names = ("device", "device, peak", "host", "host, pinned", "disk")
    table = Table("pipeline rank", "parameters", *names, title="bytes of a rank")
    for column in table.columns[1:]:
        column.justify = "right"
    for ranks, rank in _group_ranks(report.ranks):
        tiers = (rank.bytes.device, rank.peak_device_bytes, rank.bytes.host, rank.bytes.pinned, rank.bytes.disk)
        table.add_row(ranks, f"{rank.parameters:,}", *map(readable_bytes, tiers))
    return table


def _group_ranks(reports: list[RankReport]) -> list[tuple[str, RankReport]]:
    """Return (pipeline ranks, report) for each table row. Consecutive pipeline ranks with equal reports share a row, as
    in "2-5"."""
    groups = [list(group) for _, group in groupby(enumerate(reports), key=lambda item: item[1])]
    names = [str(g[0][0]) if len(g) == 1 else f"{g[0][0]}-{g[-1][0]}" for g in groups]
    return [(name, group[0][1]) for name, group in zip(names, groups, strict=True)]


def _traffic_table(report: PhaseReport) -> Table:
    table = Table("between", "bytes a step", "hidden from tokens a step", title="bytes that the busiest rank moves")
    for column in table.columns[1:]:
        column.justify = "right"
    for traffic in TRAFFIC:
        if size := report.bytes_moved_per_step[traffic]:
            table.add_row(_TRAFFIC_NAMES[traffic], readable_bytes(size), _count(report.tokens_to_hide.get(traffic)))
    if tokens := report.tokens_to_hide.get("optimizer"):
        table.add_row("(optimizer)", "", _count(tokens))
    return table


def _exchange_table(report: PhaseReport) -> Table:
    names = ("within workers", "between workers", "stays within")
    table = Table("among", *names, title="bytes that all ranks exchange per step, and where")
    for column in table.columns[1:3]:
        column.justify = "right"
    for exchange, found in report.exchanges.items():
        sizes = map(readable_bytes, (found.bytes_within_workers, found.bytes_between_workers))
        table.add_row(EXCHANGES[exchange], *sizes, _workers_text(found.workers_together))
    return table


def _workers_text(together: int) -> str:
    return "1 worker" if together == 1 else f"{together} neighbouring workers"


def _count(tokens: int | None) -> str:
    return "" if tokens is None else f"{tokens:,}"


def _imbalance_text(found: ImbalanceReport) -> str:
    if found.most_rows == 1:
        return "the experts of all ranks get equally many tokens, whatever the router chooses"
    most = f"the experts of one rank may get up to {found.most_rows:.4g} times the mean"
    then = "" if found.step_seconds is None else f", and a step then takes up to {found.step_seconds:.4g} s"
    return f"all numbers assume that the experts of all ranks get equally many tokens; {most}{then}"


def _step_text(report: PhaseReport) -> str:
    idle = f"pipeline ranks wait {report.idle_share:.1%} of the step"
    if report.step_seconds is None:
        return (
            f"{idle}, if only passes took time; to predict seconds, give --hardware a profile, which `pseudoreal"
            " measure-hardware` writes"
        )
    speed = report.tokens_per_step / report.step_seconds
    utilisation = "" if report.mfu is None else f", an MFU of {report.mfu:.1%}"
    return (
        f"a step of {report.tokens_per_step:,} tokens takes {report.step_seconds:.4g} s ({speed:,.0f} tokens/s;"
        f" {report.teraflops_per_second:.4g} TFLOP/s on a rank{utilisation}); {idle}\nbottleneck: {report.bottleneck}"
    )
