"""Output of `pseudoreal plan --fastest`: the fastest layouts of a phase, as a table."""

from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.resolved.config import PhaseConfig
from rich.console import Console
from rich.table import Table

from pseudoreal_trainer.estimate.report import PhaseReport, plan_phase
from pseudoreal_trainer.estimate.search.search import Found, Search
from pseudoreal_trainer.estimate.search.space import chosen
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile
from pseudoreal_trainer.plan.sizes import Device


@dataclass(frozen=True)
class FastestLayouts:
    """The fastest layouts of a phase that fit, fastest first, and the search that found them."""

    phase: str
    found: list[tuple[Found, PhaseReport]]
    """Layouts with their reports, fastest first; empty if no layout fits."""
    search: Search

    def as_json(self) -> dict[str, Any]:
        """Return the layouts as JSON for programs; the keys are stable."""
        layouts = [
            asdict(found.choice)
            | {
                "step_seconds": found.seconds,
                "tokens_per_second": report.tokens_per_step / found.seconds,
                "bottleneck": report.bottleneck,
                "peak_device_bytes": report.peak_device_bytes,
            }
            for found, report in self.found
        ]
        return {"name": self.phase, "layouts": layouts, "searched": asdict(self.search.counts)}


def fastest_layouts(
    config: PhaseConfig, device: Device, profile: HardwareProfile, threads: int, wanted: int
) -> FastestLayouts:
    """Return at most `wanted` of the fastest layouts of a phase. Raises ValueError if the profile lacks a speed needed
    for the phase."""
    search = Search(config, device, profile, threads)
    found = list(islice(search.fastest(), wanted))
    reports = [plan_phase(chosen(config, entry.choice), device, profile, threads).report for entry in found]
    return FastestLayouts(config.phase, [*zip(found, reports, strict=True)], search)


def show_fastest(console: Console, fastest: FastestLayouts) -> None:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    counts = fastest.search.counts
    say(f"phase {fastest.phase}: of {counts.layouts} layouts {counts.simulated} were simulated")
    if not fastest.found:
        say(
            "does not fit: none of them is within the budget and the machine; take more ranks, or let units move"
            " (offload.budget, offload.home)\n"
        )
        return
    console.print(_table(fastest))
    for number, (_, report) in enumerate(fastest.found, 1):
        say(f"{number}: bottleneck: {report.bottleneck}")
    say("")


def _table(fastest: FastestLayouts) -> Table:
    """Return the layouts as a table. The columns for replicas, expert ranks, context ranks and tensor ranks appear only
    if a layout has several of them."""
    choices = [found.choice for found, _ in fastest.found]
    meshes: list[tuple[str, list[int]]] = [
        ("pipeline", [choice.pipeline for choice in choices]),
        ("replicas", [choice.replicas for choice in choices]),
        ("expertRanks", [choice.expert_ranks for choice in choices]),
        ("contextRanks", [choice.context_ranks for choice in choices]),
        ("tensorRanks", [choice.tensor_ranks for choice in choices]),
    ]
    shown = [(name, counts) for name, counts in meshes if name == "pipeline" or max(counts) > 1]
    names = ("schedule", "stateSharding", "microBatches", "keep", "s a step", "tokens/s", "of best", "device, peak")
    table = Table("", *(name for name, _ in shown), *names, title="fastest layouts")
    best = min(found.seconds for found, _ in fastest.found)
    for number, (found, report) in enumerate(fastest.found, 1):
        choice = found.choice
        table.add_row(
            str(number),
            *(str(counts[number - 1]) for _, counts in shown),
            *(choice.schedule, choice.sharding, str(choice.micro_batches), choice.keep, f"{found.seconds:.4g}"),
            *(f"{report.tokens_per_step / found.seconds:,.0f}", f"{best / found.seconds:.1%}"),
            readable_bytes(report.peak_device_bytes),
        )
    return table
