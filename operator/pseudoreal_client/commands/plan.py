"""`pseudoreal plan`: plans a file with the trainer's command, or compares a job with the nodes of the cluster."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from pseudoreal_api.quantity import amount_of
from pseudoreal_api.resolved.resolve import gpus_of, phase_config, rank_counts
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_trainer.cli.plan_command import plan as plan_file
from pseudoreal_trainer.forecast.memory.sizes import Device
from pseudoreal_trainer.forecast.report import PlannedPhase, plan_phase
from pseudoreal_trainer.forecast.search.auto import choose, is_auto, laid_out
from pseudoreal_trainer.forecast.time.assumed import assumed_profile

from pseudoreal_client.capacity.fit import fit
from pseudoreal_client.capacity.levels import levels_of
from pseudoreal_client.capacity.nodes import Node, read_nodes
from pseudoreal_client.capacity.verdict import Verdict
from pseudoreal_client.capacity.wishes import limits_too_small, need_of, stages_left, wish_of
from pseudoreal_client.cluster.connect import Connection, Where, connect
from pseudoreal_client.commands.options import cluster_options, names_of_jobs
from pseudoreal_client.files.job_file import only_job, read_job_file
from pseudoreal_client.refusal import ExitStatus, Refusal
from pseudoreal_client.view.seen import SeenJob

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
"""Pattern of job names. Job names have neither dots nor slashes and so differ from file names."""


@dataclass(frozen=True)
class _Planned:
    """The job to plan. `uid` is set for an existing job: its own pods do not count as used."""

    job: PseudoRealJob
    status: PseudoRealJobStatus
    uid: str = ""


def _plan(
    job: str,
    on_cluster: bool,
    phase: str | None,
    as_json: bool,
    namespace: str | None,
    context: str | None,
    kubeconfig: str | None,
    **local: Any,
) -> None:
    """Say what each phase of a job needs, and whether a cluster has it.

    JOB is a file, or the name of a job on the cluster. A file is planned alone, without a cluster, unless --on-cluster
    is given. On a cluster the forecast of each stage that is left is compared with what the nodes have, and with what
    is free on them.

    Ends with exit code 78 when a phase does not fit, and with 1 when it would fit if other pods ended.
    """
    is_name = _NAME.fullmatch(job) and not Path(job).exists()
    if not is_name and not on_cluster:
        assert plan_file.callback is not None, "a click command with a function has a callback"
        plan_file.callback(file=Path(job), phase=phase, as_json=as_json, **local)
        return
    if given := [name for name, value in local.items() if value is not None]:
        raise click.UsageError(f"--{given[0].removesuffix('_file')} is for a file alone")
    connection = connect(Where(namespace, context, kubeconfig))
    planned = _on_cluster(connection, job) if is_name else _in_file(Path(job))
    _say(_verdicts(connection, planned, phase), as_json=as_json)


def _on_cluster(connection: Connection, name: str) -> _Planned:
    seen = SeenJob(connection.api.job(connection.namespace, name))
    if seen.is_over:
        raise Refusal(f"{name} has ended ({seen.status.state}), and needs no nodes any more")
    if seen.spec is None:
        raise Refusal(
            f"the spec of {name} cannot be planned: it is that of another release, or cannot run; pseudoreal describe"
            f" {name} -n {seen.namespace} says more"
        )
    return _Planned(PseudoRealJob.from_object(seen.body), seen.status, seen.uid)


def _in_file(path: Path) -> _Planned:
    body = only_job(read_job_file(path)).body
    return _Planned(PseudoRealJob.from_object(body), PseudoRealJobStatus())


def _verdicts(connection: Connection, planned: _Planned, phase: str | None) -> list[Verdict]:
    names = [one.name for one in planned.job.spec.phases]
    if phase is not None and phase not in names:
        raise Refusal(f"there is no phase {phase}; there are {', '.join(names)}", ExitStatus.NOT_FOUND)
    nodes = _nodes(connection, planned.uid)
    return [_verdict(planned, stage, nodes) for stage in stages_left(planned.job, planned.status, phase)]


def _nodes(connection: Connection, uid: str) -> list[Node]:
    nodes = connection.api.each("Node", None)
    try:
        pods = connection.api.each("Pod", None, fields="status.phase!=Succeeded,status.phase!=Failed")
    except Refusal as refusal:
        if refusal.status is not ExitStatus.FORBIDDEN:
            raise
        click.echo("you may not list the pods of all namespaces: nodes are taken to be empty", err=True)
        pods = []
    return read_nodes(nodes, pods, uid)


def _verdict(about: _Planned, stage: Stage, nodes: list[Node]) -> Verdict:
    job, phase = about.job, about.job.spec.phases[stage.index]
    if stage.kind is StageKind.DELINK:
        wish = wish_of(job, stage, None)
        return Verdict(stage.title, stage.phase, wish, None, fit(nodes, wish), nodes, [])
    planned = _forecast(job, stage.index, about.status)
    report = planned.report
    need = need_of(job, phase, report)
    wish = wish_of(job, stage, need)
    problems = [*report.reasons, *limits_too_small(phase, wish.spec, need)]
    found = fit(nodes, wish)
    levels = levels_of(found, wish.topology, planned.layout.mesh, planned.flows) if found.fits_now else []
    return Verdict(stage.title, stage.phase, wish, need, found, nodes, problems, levels)


def _forecast(job: PseudoRealJob, index: int, status: PseudoRealJobStatus) -> PlannedPhase:
    phase = job.spec.phases[index]
    config = phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
    cores = phase.resources.limits.get("cpu", phase.resources.requests.get("cpu", 1))
    threads = max(1, int(amount_of(cores)) // rank_counts(job.spec, phase).processes_per_worker)
    if is_auto(config):
        # A layout chosen for fewer workers (elastic) does not apply to the full number.
        is_whole = status.elastic is None or status.elastic.phase_name != phase.name
        known = next((one.layout for one in status.phases if one.name == phase.name and is_whole), None)
        # The hardware profile that the job names is a file in its pods, so a default profile is assumed here.
        device: Device = "cuda" if gpus_of(phase) else "cpu"
        config = laid_out(config, known or choose(config, assumed_profile(device), threads))
    return plan_phase(config, "cuda" if gpus_of(phase) else "cpu", None, threads)


def _say(verdicts: list[Verdict], *, as_json: bool) -> None:
    """Print the verdicts. Raises SystemExit with the exit code if a stage does not fit, or does not fit now."""
    if as_json:
        click.echo(json.dumps({"stages": [verdict.as_json() for verdict in verdicts]}, indent=2))
    else:
        click.echo("\n".join(line for verdict in verdicts for line in verdict.lines()))
    if not all(verdict.can_run for verdict in verdicts):
        raise SystemExit(ExitStatus.INVALID_JOB)
    if not all(verdict.can_run_now for verdict in verdicts):
        raise SystemExit(ExitStatus.REFUSED)


plan: click.Command = cluster_options(
    click.Command(
        "plan",
        callback=_plan,
        help=_plan.__doc__,
        params=[
            click.Argument(["job"], metavar="JOB", shell_complete=names_of_jobs),
            click.Option(["--on-cluster"], is_flag=True, help="Compare a file with the nodes of the cluster as well."),
            *plan_file.params[1:],
        ],
    )
)
