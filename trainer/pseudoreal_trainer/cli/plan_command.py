"""The commands `pseudoreal plan` and `pseudoreal measure-hardware`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import yaml
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.wire.messages import ExitCode
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pseudoreal_trainer.cgroups import threads_of
from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, ExitStatus, cluster_options, load, names_of_jobs
from pseudoreal_trainer.cli.fastest_layouts import FastestLayouts, fastest_layouts, show_fastest
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.cli.plan_display import show, show_course
from pseudoreal_trainer.cli.planning import Phase, phases_to_plan, search_auto_layouts, with_auto_layouts
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import PlannedPhase, plan_phase
from pseudoreal_trainer.estimate.schedule import PhaseDuration
from pseudoreal_trainer.estimate.time.hardware import HardwareProfile, read_profile
from pseudoreal_trainer.estimate.trace import trace_of

_JOB_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Pattern of job names. Unlike names of files, job names have neither dots nor slashes."""


@click.command()
@click.argument("job", shell_complete=names_of_jobs)
@click.option("--on-cluster", is_flag=True, help="Compare what the job in a file needs with the nodes of the cluster.")
@click.option("--phase", help="Plan only this phase.")
@click.option(
    "--hardware", type=click.Path(path_type=Path), help="Hardware profile; with it, seconds are predicted, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys are stable.")
@click.option(
    "--trace", type=click.Path(path_type=Path), help="File for a step of each phase, as a Chrome trace for Perfetto."
)
@click.option(
    "--days",
    type=click.FloatRange(0, min_open=True),
    help="Print what must change for the job to end within this many days; needs --hardware.",
)
@click.option(
    "--fastest",
    type=click.IntRange(1, 100),
    help="Search for this many of the fastest layouts of each phase that fit, and print only them; needs --hardware.",
)
@cluster_options
def plan(
    cluster: ClusterOptions,
    job: str,
    on_cluster: bool,
    phase: str | None,
    hardware: Path | None,
    as_json: bool,
    trace: Path | None,
    days: float | None,
    fastest: int | None,
) -> None:
    """Estimate what each phase of a job needs, and compare it with a cluster.

    JOB is a file, or the name of a job on the cluster. Without --on-cluster, a file is planned without a cluster: bytes
    on each tier and rank, bytes on each link per step, the share of time in which ranks wait, and, with the profile of
    a machine, the time of a step and its bottleneck. The corpus may be missing.

    On a cluster, the estimate for each unfinished stage is compared with the resources of the nodes, and with their
    free resources.

    Exit code 78: a phase does not fit; 1: it would fit if other pods ended.
    """
    is_name = _JOB_NAME.fullmatch(job) is not None and not Path(job).exists()
    if not is_name and not on_cluster:
        _plan_file(Path(job), phase, hardware, trace, days, fastest, as_json=as_json)
        return
    for name, value in {"hardware": hardware, "trace": trace, "days": days, "fastest": fastest}.items():
        if value is not None:
            raise click.UsageError(f"--{name} is for a file alone")
    plan_on_cluster = load("pseudoreal_client.commands.plan_on_cluster:plan_on_cluster", "plan")
    plan_on_cluster(cluster, job if is_name else Path(job), phase, as_json=as_json)


def _plan_file(
    file: Path,
    phase: str | None,
    hardware: Path | None,
    trace: Path | None,
    days: float | None,
    fastest: int | None,
    *,
    as_json: bool,
) -> None:
    try:
        profile = read_profile(hardware) if hardware else None
        phases = _select_phases(file, phases_to_plan(parse_job(file), profile), phase)
        searched = [] if fastest is not None else search_auto_layouts(phases, profile)
        if not all(layouts.found for layouts in searched):
            sys.exit(_print_layouts(searched, as_json=as_json))
        if fastest is not None:
            sys.exit(_search_fastest(phases, profile, fastest, as_json=as_json))
        if days is not None and profile is None:
            raise InvalidJobError("--days needs seconds: give --hardware the profile of a machine")
        phases = with_auto_layouts(phases, searched)
        planned = list(_plan_phases(phases, profile))
    except ValueError as error:
        raise CommandError(str(error), ExitStatus.INVALID_JOB) from error
    _print_plan(planned, searched, as_json=as_json)
    if profile is not None and not as_json:
        show_course(Console(), _courses([config for config, _ in phases], planned), days)
    if trace is not None:
        # Without a profile, the unit of time is the forward pass of a layer, shown as a millisecond.
        steps = {phase.report.name: phase.timeline for phase in planned}
        trace.write_text(json.dumps(trace_of(steps, microseconds=1e6 if profile else 1e3)), encoding="utf-8")
    if not all(phase.report.fits for phase in planned):
        sys.exit(ExitCode.INVALID_JOB)


def _select_phases(file: Path, phases: list[Phase], name: str | None) -> list[Phase]:
    """Return the phase `name`; None: all phases. Raises InvalidJobError if there is no such phase."""
    names = [phase.phase for phase, _ in phases]
    if name is not None and name not in names:
        raise InvalidJobError(f"{file} has no phase {name}; its phases are {', '.join(names)}")
    return [(phase, device) for phase, device in phases if name in (None, phase.phase)]


def _plan_phases(phases: list[Phase], profile: HardwareProfile | None) -> Iterator[PlannedPhase]:
    # On stderr, because stdout may be JSON for a program.
    with Console(stderr=True).status("planning") as status:
        for phase, device in phases:
            status.update(f"planning phase {phase.phase}")
            yield plan_phase(phase, device, profile, threads_of(phase.processes_per_worker))


def _search_fastest(phases: list[Phase], profile: HardwareProfile | None, wanted: int, *, as_json: bool) -> ExitCode:
    """Search the layouts of each phase, print them and return the exit code. Raises InvalidJobError without a
    profile, and ValueError if the profile lacks a needed speed."""
    if profile is None:
        raise InvalidJobError(
            "--fastest compares seconds, which need the profile of a machine; give --hardware a profile, which"
            " `pseudoreal measure-hardware` writes"
        )
    found = []
    with Console(stderr=True).status("searching") as status:
        for phase, device in phases:
            status.update(f"searching the layouts of phase {phase.phase}")
            threads = threads_of(phase.processes_per_worker)
            found.append(fastest_layouts(phase, device, profile, threads, wanted))
    return _print_layouts(found, as_json=as_json)


def _print_layouts(found: list[FastestLayouts], *, as_json: bool) -> ExitCode:
    if as_json:
        click.echo(json.dumps({"phases": [phase.as_json() for phase in found]}, indent=2))
    else:
        for phase_layouts in found:
            show_fastest(Console(), phase_layouts)
    return ExitCode.SUCCEEDED if all(phase.found for phase in found) else ExitCode.INVALID_JOB


def _print_plan(planned: list[PlannedPhase], searched: list[FastestLayouts], *, as_json: bool) -> None:
    if as_json:
        auto = {"auto": [layouts.as_json() for layouts in searched]} if searched else {}
        reports = [phase.report.model_dump(mode="json") for phase in planned]
        click.echo(json.dumps({"phases": reports} | auto, indent=2))
        return
    console = Console()
    for layouts in searched:
        show_fastest(console, layouts)
    for phase in planned:
        show(console, phase.report)


def _courses(configs: list[PhaseConfig], planned: list[PlannedPhase]) -> list[PhaseDuration]:
    """Return the duration of each planned phase. A phase planned alone starts at step 0."""
    begins = [0] * len(configs) if len(configs) == 1 else [0, *(config.phase_steps for config in configs[:-1])]
    return [
        PhaseDuration(
            config.phase,
            config.phase_steps - begin,
            phase.report.tokens_per_step,
            phase.timeline.seconds,
            phase.report.bottleneck or "",
        )
        for config, begin, phase in zip(configs, begins, planned, strict=True)
    ]


@click.command("measure-hardware")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("hardware.yaml"),
    show_default=True,
    help="File for the profile.",
)
def measure_hardware(output: Path) -> None:
    """Measure how fast this machine is, for `pseudoreal plan --hardware`.

    Takes one to two minutes, during which the machine should be idle otherwise: passes over blocks of several sizes,
    copies, the optimizer, the disk of temporary files, and messages among as many ranks as there are devices or cores.
    """
    from pseudoreal_trainer.measure.machine import measure_machine, measurements

    # Fail now rather than after minutes of measuring if the output cannot be written.
    output.open("ab").close()
    console = Console()
    with Progress(
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        BarColumn(),
        TextColumn("{task.description}"),
        console=console,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=measurements())

        def progress(words: str) -> None:
            bar.update(task, description=words, advance=1)
            if not console.is_terminal:
                click.echo(words)

        profile = measure_machine(progress)
    output.write_text(yaml.safe_dump(profile.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    click.echo(f"{output}: {profile.name}; use it with: pseudoreal plan JOB.yaml --hardware {output}")
