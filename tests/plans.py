"""Plans of the jobs in examples/gpu: `python -m tests.plans` writes each into the head of its file, and a table of all
of them into docs/gpus.md.

A file names the profile of its machine in the line "# Planned with …"; the plan is everything from there to the job.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pseudoreal_api.quantity import readable_bytes
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.estimate.report import PhaseReport, plan_phase
from pseudoreal_trainer.estimate.schedule import PhaseDuration, total_days
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, read_profile

_REPOSITORY = Path(__file__).parent.parent
EXAMPLES = _REPOSITORY / "examples" / "gpu"
PAGE = _REPOSITORY / "docs" / "gpus.md"

_PLAN = re.compile(
    r"#\n# Planned with examples/hardware/(?P<profile>[a-z0-9-]+)\.yaml.*?(?=^# yaml-language|^apiVersion)", re.M | re.S
)
_TABLE = re.compile(r"(?<=<!-- plans: written by python -m tests\.plans -->\n).*?(?=<!-- end of plans -->)", re.S)


@dataclass(frozen=True)
class Planned:
    """One phase of an example, planned."""

    config: PhaseConfig
    report: PhaseReport
    duration: PhaseDuration


@dataclass(frozen=True)
class Plan:
    profile: HardwareProfile
    profile_file: str
    phases: list[Planned]

    @property
    def days(self) -> float:
        return total_days([phase.duration for phase in self.phases])

    @property
    def tokens(self) -> int:
        return sum(_tokens(phase) for phase in self.phases)


def example_files() -> list[Path]:
    return sorted(EXAMPLES.glob("*.yaml"))


@cache
def plan_of(file: Path) -> Plan:
    found = _PLAN.search(file.read_text())
    assert found is not None, f'{file} has no line "# Planned with examples/hardware/….yaml" before its job'
    hardware = _REPOSITORY / "examples" / "hardware" / f"{found['profile']}.yaml"
    profile = read_profile(hardware)
    return Plan(profile, str(hardware.relative_to(_REPOSITORY)), planned_phases(parse_job(file), profile))


def planned_phases(job: PseudoRealJob, profile: HardwareProfile) -> list[Planned]:
    """Plan the phases of a job, as if all their ranks had a GPU."""
    phases, begin = [], 0
    for index in range(len(job.spec.phases)):
        config = phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
        # Threads count on CPUs alone; a fixed number makes the plan the same on every machine.
        planned = plan_phase(config, "accelerator", profile, threads=1)
        report, steps = planned.report, config.phase_steps - begin
        begin = config.phase_steps
        duration = PhaseDuration(
            config.phase, steps, report.tokens_per_step, planned.timeline.seconds, report.bottleneck or ""
        )
        phases.append(Planned(config, report, duration))
    return phases


def with_plan(file: Path) -> str:
    """Return the text of an example with its plan as it is now."""
    lines = ["", *_head(plan_of(file)), "", *_columns(plan_of(file)), "", *_sentences(plan_of(file))]
    comment = "".join(f"# {line}".rstrip() + "\n" for line in lines)
    return _PLAN.sub(lambda _: comment, file.read_text())


def with_table(page: str) -> str:
    """Return the page with the table of all plans as they are now."""
    heads = ("job", "machine", "GPUs", "parameters", "tokens", "on a GPU, at most", "host, disk of a rank", "days")
    by_size = sorted(example_files(), key=lambda file: plan_of(file).phases[-1].report.parameters)
    rows = [heads, ("---",) * len(heads), *map(_row, by_size)]
    return _TABLE.sub(lambda _: "".join(f"| {' | '.join(row)} |\n" for row in rows), page)


def _row(file: Path) -> tuple[str, ...]:
    plan = plan_of(file)
    reports = [phase.report for phase in plan.phases]
    most = max(report.peak_device_bytes for report in reports)
    host, disk = (max(getattr(report.bytes, tier) for report in reports) for tier in ("host", "disk"))
    return (
        f"[{file.stem}](../examples/gpu/{file.name})",
        f"[{Path(plan.profile_file).stem}](../{plan.profile_file})",
        str(max(phase.config.ranks for phase in plan.phases)),
        f"{max(report.parameters for report in reports):,}",
        f"{plan.tokens / 1e9:,.0f} B",
        readable_bytes(most),
        f"{readable_bytes(host)}, {readable_bytes(disk)}",
        f"{plan.days:.3g}",
    )


def _head(plan: Plan) -> list[str]:
    return [
        f"Planned with {plan.profile_file}, whose speeds are assumed, not measured. Bytes are for the rank",
        "that needs most; written by `python -m tests.plans`.",
    ]


def _columns(plan: Plan) -> list[str]:
    rows = [("phase", "GPUs", "parameters", "tokens", "on a GPU", "host", "disk", "s a step", "tokens/s", "days")]
    for phase in plan.phases:
        report, duration = phase.report, phase.duration
        rows.append(
            (
                phase.config.phase,
                str(phase.config.ranks),
                f"{report.parameters:,}",
                f"{_tokens(phase):,}",
                readable_bytes(report.peak_device_bytes),
                readable_bytes(report.bytes.host),
                readable_bytes(report.bytes.disk),
                f"{duration.step_seconds:.4g}",
                f"{report.tokens_per_step / duration.step_seconds:,.0f}",
                f"{duration.days:.3g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]


def _sentences(plan: Plan) -> list[str]:
    balanced = ", if the experts of all ranks get as many tokens" * any(phase.report.imbalance for phase in plan.phases)
    bottlenecks = [f"{phase.config.phase}: {phase.duration.bottleneck}." for phase in plan.phases]
    first, *others = (phase.duration for phase in plan.phases)
    ratios = [(other.name, other.step_seconds / first.step_seconds) for other in others]
    compared = [f"A step of {name} takes {ratio:.2f} times as long as one of {first.name}." for name, ratio in ratios]
    return [*bottlenecks, *compared, f"The job takes {plan.days:.3g} days{balanced}."]


def _tokens(phase: Planned) -> int:
    return phase.duration.steps * phase.duration.tokens_per_step


def main() -> None:
    for file in example_files():
        file.write_text(with_plan(file))
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
