"""`pseudoreal plan` on a cluster: compares the needs of a job with the nodes."""

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click
from pseudoreal.client import Client
from pseudoreal.errors import Forbidden, NotFound
from pseudoreal_api.quantity import amount_of
from pseudoreal_api.resolved.resolve import phase_config, rank_counts
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.observe.claims import Claim, mounted_claims, read_claim
from pseudoreal_operator.observe.stages import Stage, StageKind
from pseudoreal_trainer.cli.common import ClusterOptions, CommandError, ExitStatus
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.estimate.report import PlannedPhase, plan_phase
from pseudoreal_trainer.estimate.search.auto import choose, is_auto, laid_out
from pseudoreal_trainer.estimate.time.assumed import assumed_profile
from pseudoreal_trainer.plan.sizes import Device

from pseudoreal_client.capacity.fit import fit
from pseudoreal_client.capacity.nodes import Node, read_nodes
from pseudoreal_client.capacity.pod_sets import limits_below_needs, needs_of, pod_set_of, stages_left
from pseudoreal_client.capacity.stage_report import StageReport, traffic_levels
from pseudoreal_client.commands.options import command_errors, connect


@dataclass(frozen=True)
class _Planned:
    """The job to plan. `uid` is set for an existing job, so that the job's own pods do not count as used."""

    job: PseudoRealJob
    status: PseudoRealJobStatus
    uid: str = ""


def plan_on_cluster(cluster: ClusterOptions, job: str | Path, phase: str | None, *, as_json: bool) -> None:
    """Print whether the nodes of the cluster have room for a job. `job`: name of a job on the cluster, or a file."""
    with command_errors():
        client = connect(cluster)
        planned = _read_file(job) if isinstance(job, Path) else _read_job(client, job)
        reports = _report_stages(client, planned, phase)
    _print_reports(reports, as_json=as_json)


def _read_job(client: Client, name: str) -> _Planned:
    job = client.observe(name)
    if job.is_over:
        raise CommandError(f"{name} has ended ({job.status.state}), and needs no nodes any more")
    if job.spec is None:
        raise CommandError(
            f"the spec of {name} cannot be planned: it is that of another release, or cannot run; pseudoreal describe"
            f" {name} -n {job.namespace} says more"
        )
    return _Planned(PseudoRealJob.from_object(job.body), job.status, job.uid)


def _read_file(path: Path) -> _Planned:
    return _Planned(parse_job(path), PseudoRealJobStatus())


def _report_stages(client: Client, planned: _Planned, phase: str | None) -> list[StageReport]:
    names = [one.name for one in planned.job.spec.phases]
    if phase is not None and phase not in names:
        raise CommandError(f"there is no phase {phase}; there are {', '.join(names)}", ExitStatus.NOT_FOUND)
    nodes = _nodes(client, planned.uid)
    return [
        _report_stage(planned, stage, nodes, [*_claims(client, planned.job, stage)])
        for stage in stages_left(planned.job, planned.status, phase)
    ]


def _nodes(client: Client, uid: str) -> list[Node]:
    nodes = client.api.each("Node", None)
    try:
        pods = client.api.each("Pod", None, fields="status.phase!=Succeeded,status.phase!=Failed")
    except Forbidden:
        click.echo("you may not list the pods of all namespaces: nodes are taken to be empty", err=True)
        pods = []
    return read_nodes(nodes, pods, uid)


def _claims(client: Client, job: PseudoRealJob, stage: Stage) -> Iterator[Claim]:
    """Yield the claims that the pods of a stage mount, as far as they exist and the user may read them."""
    for claim in mounted_claims(job, stage):
        with suppress(NotFound, Forbidden):
            yield read_claim(claim, client.api.claim(client.namespace, claim.name))


def _report_stage(target: _Planned, stage: Stage, nodes: list[Node], claims: list[Claim]) -> StageReport:
    job, phase = target.job, target.job.spec.phases[stage.index]
    if stage.kind is StageKind.DELINK:
        pods = pod_set_of(job, stage, None)
        return StageReport(stage.title, stage.phase, pods, None, fit(nodes, pods), nodes, [])
    planned = _estimate_phase(job, stage.index, target.status)
    report = planned.report
    need = needs_of(job, phase, report)
    pods = pod_set_of(job, stage, need, claims)
    problems = [*report.reasons, *limits_below_needs(phase, pods.spec, need)]
    found = fit(nodes, pods)
    levels = traffic_levels(found, pods.topology, planned.layout.mesh, planned.flows) if found.fits_now else []
    return StageReport(stage.title, stage.phase, pods, need, found, nodes, problems, levels)


def _estimate_phase(job: PseudoRealJob, index: int, status: PseudoRealJobStatus) -> PlannedPhase:
    phase = job.spec.phases[index]
    config = phase_config(job, index, execution=1, work_directory=".", offload_directory=".")
    device: Device = "accelerator" if config.gpus else "cpu"
    cores = phase.resources.limits.get("cpu", phase.resources.requests.get("cpu", 1))
    threads = max(1, int(amount_of(cores)) // rank_counts(job.spec, phase).processes_per_worker)
    if is_auto(config):
        # A layout chosen for fewer workers (elastic) does not apply to the full number.
        is_whole = status.elastic is None or status.elastic.phase_name != phase.name
        known = next((one.layout for one in status.phases if one.name == phase.name and is_whole), None)
        # The hardware profile that the job names is a file in its pods, so a default profile is assumed here.
        config = laid_out(config, known or choose(config, assumed_profile(device), threads))
    return plan_phase(config, device, None, threads)


def _print_reports(reports: list[StageReport], *, as_json: bool) -> None:
    """Print the reports. Raises SystemExit with the exit code if a stage does not fit, or does not fit now."""
    if as_json:
        click.echo(json.dumps({"stages": [report.as_json() for report in reports]}, indent=2))
    else:
        click.echo("\n".join(line for report in reports for line in report.lines()))
    if not all(report.can_run for report in reports):
        raise SystemExit(ExitStatus.INVALID_JOB)
    if not all(report.can_run_now for report in reports):
        raise SystemExit(ExitStatus.FAILED)
