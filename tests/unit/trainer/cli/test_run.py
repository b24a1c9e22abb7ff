"""`pseudoreal run` and the pod program as real processes."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_trainer.accelerator.environment import TAKE_FOUND
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.heads import read_manifest
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli import local_run, run_command
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.local_run import LocalRun
from pseudoreal_trainer.cli.run_command import ignored_fields, read_job
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.report.figures import charts_of
from pseudoreal_trainer.report.job import jobs_of
from pseudoreal_trainer.report.reading import read_job_files
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import SHUTDOWN_TIMEOUT, torchrun_environment
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity
from pseudoreal_trainer.runtime.reports import rank_heartbeats
from pseudoreal_trainer.runtime.termination import OUTCOME_DIRECTORY
from torch.distributed.run import config_from_args, parse_args

from tests.support.checkpoints import newest
from tests.support.patience import wait_for
from tests.support.pods import meeting, start_pod
from tests.support.ports import free_port

STEPS = 150
DEADLINE = 300.0


def _run(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.command", "run", "job.yaml", *arguments]
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _wait_for_lines(metrics: Path, count: int, process: subprocess.Popen[str]) -> None:
    def there() -> bool:
        assert process.poll() is None, process.communicate()[0]
        return _lines(metrics) >= count

    wait_for(f"{count} lines", there, patience=DEADLINE, pause=0.01)


def _lines(metrics: Path) -> int:
    return metrics.read_text().count("\n") if metrics.exists() else 0


def _newest(work: Path, phase: str) -> Reader:
    manifest = read_manifest(next((work / "checkpoints").glob(f"{phase}-*")))
    assert manifest is not None
    return newest(CheckpointStore(work, manifest.job.uid), phase, complete=True)


def test_a_stopped_and_resumed_run_has_the_weights_of_an_uninterrupted_one(
    job_body: dict[str, Any], tmp_path: Path, train_job: Any
) -> None:
    spec = job_body["spec"]
    spec["data"]["path"] = "corpus"
    spec["phases"][0]["until"]["step"], spec["phases"][1]["until"]["step"] = STEPS, STEPS + 20
    spec["data"]["validation"]["everySteps"], spec["checkpoint"]["everySteps"] = 50, 50
    (tmp_path / "job.yaml").write_text(yaml.safe_dump_all([{"kind": "PersistentVolumeClaim"}, job_body]))
    work = tmp_path / "runs"

    stopped = _run(tmp_path, "--workdir", "runs")
    _wait_for_lines(work / "metrics.jsonl", 3, stopped)
    stopped.send_signal(signal.SIGINT)
    said = stopped.communicate(timeout=DEADLINE)[0]
    assert stopped.returncode == 75, said
    assert "pseudoreal run job.yaml --workdir runs --resume" in said
    message = json.loads((work / "pods" / "pseudo-train.termination.json").read_text())
    assert message["outcome"] == "Yielded"
    assert 3 <= message["step"] < STEPS
    assert message["checkpoint"] == f"pseudo-{message['step']:08d}"

    resumed = _run(tmp_path, "--workdir", "runs", "--resume")
    said = resumed.communicate(timeout=DEADLINE)[0]
    assert resumed.returncode == 0, said
    assert f"resumed from {message['checkpoint']}" in said
    assert "2 ranks on cpu" in said
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 21))
    _check_page(work, message["checkpoint"])

    job_body["spec"]["data"]["path"] = str(tmp_path / "corpus")
    train_job("whole")
    for phase, tolerance in (("pseudo", 0.0), ("real", 1e-11)):
        expected, found = _newest(tmp_path / "whole", phase).whole(), _newest(work, phase).whole()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance)

    shown = CliRunner().invoke(main, ["sample", str(work / "checkpoints" / f"real-{STEPS + 20:08d}"), "--tokens", "5"])
    assert shown.exit_code == 0, shown.output


def _check_page(work: Path, checkpoint: str) -> None:
    """Check the page of the run that was stopped at `checkpoint` and resumed."""
    file = work / "report.html"
    shown = CliRunner().invoke(main, ["report", str(work), "-o", str(file)])
    assert (shown.exit_code, shown.stdout) == (0, f"{file}\n"), shown.output
    (job,) = jobs_of([read_job_files(work)])
    assert (job.name, job.notices) == ("tiny", [])
    (restart,) = job.restarts
    assert (restart.phase, restart.execution, restart.checkpoint) == ("pseudo", 2, checkpoint)
    assert (restart.outcome, restart.cause) == ("Yielded", f"asked to stop; saved checkpoint {checkpoint}")
    assert (restart.pod, restart.ranks) == (socket.gethostname(), (0,))
    stages = [(run.phase, run.stage, run.execution, run.outcome) for run in job.runs]
    assert stages == [
        ("pseudo", "train", 1, "Yielded"),
        ("pseudo", "train", 2, "Succeeded"),
        ("real", "delink", 2, "Succeeded"),
        ("real", "train", 2, "Succeeded"),
    ]
    assert [(border.step, border.kind) for border in job.transitions] == [(STEPS, "delink")]
    kept = {each.name for each in job.lineage.checkpoints if each.is_kept}
    assert kept == {path.parent.name for path in (work / "checkpoints").glob("*/manifest.json")}
    assert [(edge.source, edge.target) for edge in job.lineage.edges if edge.is_link] == [
        (f"pseudo-{STEPS:08d}", f"real-{STEPS:08d}")
    ]
    assert list(job.predicted) == ["pseudo", "real"]
    charts = {chart.id: chart for chart in charts_of([job])}
    assert charts["loss"].lines[0].x["step"] == list(range(1, STEPS + 21))
    assert {mark.kind for mark in charts["loss"].marks} == {"delink", "restart"}
    for text in ("delink from 1 to 4 blocks", f"asked to stop; saved checkpoint {checkpoint}"):
        assert text in file.read_text()


def test_run_grows_layers_and_experts(job_body: dict[str, Any], tmp_path: Path) -> None:
    """Its first checkpoint after the growth has no files of its own, and can be inspected, verified and exported."""
    spec = job_body["spec"]
    spec["data"]["path"] = "corpus"
    spec["model"]["experts"] = {"type": "TopK", "count": 4, "topK": {"perToken": 1}}
    spec["delink"] = {"noise": "0.05"}
    shallow, deep = spec["phases"]
    spec["phases"] = [shallow | {"layers": 2, "experts": 2}, deep | {"workers": 1}]
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_body))
    run = _run(tmp_path, "--workdir", "runs")
    said = run.communicate(timeout=DEADLINE)[0]
    assert run.returncode == 0, said
    grown = "grown from 2 to 4 layers (Stack) and from 2 to 4 experts, 4 blocks and 4 sets of experts"
    assert f"{grown}: real-00000006 from pseudo-00000006" in said
    checkpoints = tmp_path / "runs" / "checkpoints"
    assert [path.name for path in (checkpoints / "real-00000006").iterdir()] == ["manifest.json"]
    for command in (["inspect"], ["verify"], ["export", "--format", "safetensors", "--output", str(tmp_path / "file")]):
        shown = CliRunner().invoke(main, [command[0], str(checkpoints / "real-00000006"), *command[1:]])
        assert shown.exit_code == 0, shown.output
        assert command != ["inspect"] or re.search(r"layers +4\n", shown.output)
    _check_page_of_experts(tmp_path / "runs")


def _check_page_of_experts(work: Path) -> None:
    """Check that the page draws the balance of the experts, as the metrics have it, and the growth."""
    lines = [json.loads(line) for line in (work / "metrics.jsonl").read_text().splitlines()]
    charts = {chart.id: chart for chart in charts_of(jobs_of([read_job_files(work)]))}
    columns = {
        "expert-load": ["expert_load_max", "expert_load_mean"],
        "expert-shares": ["idle_experts", "dropped_tokens"],
        "router-entropy": ["router_entropy"],
    }
    for name, curves in columns.items():
        expected = [[float(f"{line[curve]:.6g}") for line in lines] for curve in curves]
        assert [line.y for line in charts[name].lines] == expected
        (mark,) = charts[name].marks
        assert (mark.kind, mark.x["step"]) == ("growth", 6)
    loads = [load for load in charts["expert-load"].lines[0].y if load is not None]
    assert min(loads) >= 1, "the expert with the most has at least the mean"
    shown = CliRunner().invoke(main, ["report", str(work), "-o", str(work / "report.html")])
    assert shown.exit_code == 0, shown.output
    text = (work / "report.html").read_text()
    for said in ("Balance of experts", "phase real, growth from 2 to 4 layers, growth from 2 to 4 experts"):
        assert said in text, said


@pytest.mark.parametrize(("own", "seconds"), [(None, 3600), ("100", 100)])
def test_torchrun_gives_ranks_time_to_save_after_a_stop(
    own: str | None, seconds: int, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's own parser reads the options. By default torchrun kills ranks after 30 s, which may be too short for a
    save. A value set by the operator takes precedence."""
    monkeypatch.delenv(SHUTDOWN_TIMEOUT, raising=False)
    if own is not None:
        monkeypatch.setenv(SHUTDOWN_TIMEOUT, own)
    for name, value in torchrun_environment(config(0), PodFolder(tmp_path), RendezvousIdentity(0, 0, 0, 0)).items():
        monkeypatch.setenv(name, value)
    options, _, _ = config_from_args(
        parse_args(["--max-restarts", "0", "--module", "pseudoreal_trainer.cli.rank", "x"])
    )
    assert options.shutdown_timeout == seconds


def test_a_pod_without_its_corpus_ends_as_invalid_job(job_body: Any, config: Any, tmp_path: Path, train: Any) -> None:
    train(config(0), stop=lambda: True)
    job_body["spec"]["data"]["path"] = str(tmp_path / "nowhere")
    ended = start_pod(config(0), tmp_path / "pod")
    assert ended.wait() == 78, ended.said()
    message = ended.message()
    assert message["outcome"] == "InvalidJob"
    assert "nowhere is not a folder" in message["message"]
    assert (message["step"], message["checkpoint"]) == (1, "pseudo-00000001"), "the newest existing checkpoint"


def test_a_delink_pod_that_cannot_delink_fails_with_a_sentence(delink_of: Any, tmp_path: Path) -> None:
    ended = start_pod(delink_of(1), tmp_path / "pod")
    assert ended.wait() == 1
    message = ended.message()
    assert (message["outcome"], message["phase"]) == ("Failed", "real")
    assert "phase pseudo has no complete checkpoint" in message["message"]


def _invoke(job_body: Any, folder: Path, *arguments: str) -> Any:
    (folder / "job.yaml").write_text(yaml.safe_dump(job_body))
    return CliRunner().invoke(main, ["run", str(folder / "job.yaml"), "--workdir", str(folder / "runs"), *arguments])


def test_run_prints_every_fault_of_the_job(job_body: Any, tmp_path: Path) -> None:
    job_body["spec"]["phases"][0]["sharing"]["blocks"] = 3
    job_body["spec"]["optimizer"]["learningRate"] = "0"
    refused = _invoke(job_body, tmp_path)
    assert refused.exit_code == 78
    assert "blocks 3 must divide spec.model.layers 4" in refused.stderr
    assert "learningRate 0 must be greater than 0" in refused.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: b["spec"]["data"].update(path="gone"), r"gone is not a folder"),
        (lambda b: b["spec"]["phases"][1].update(workers=9), "9 data-parallel ranks"),
        (lambda b: b.update(kind="Job"), "holds no object of kind PseudoRealJob"),
    ],
)
def test_run_rejects_an_impossible_job_before_it_starts(
    change: Any, sentence: str, job_body: Any, tmp_path: Path
) -> None:
    change(job_body)
    refused = _invoke(job_body, tmp_path)
    assert refused.exit_code == 78
    assert sentence in refused.stderr


def _file_in_the_way(folder: Path) -> None:
    (folder / "runs").write_text("")


def _record_that_is_a_folder(folder: Path) -> None:
    (folder / "runs" / "job.json").mkdir(parents=True)


def _pods_that_are_a_file(folder: Path) -> None:
    (folder / "runs").mkdir()
    (folder / "runs" / "pods").write_text("")


def _name_that_is_too_long(folder: Path) -> None:
    (folder / "runs").symlink_to(folder / ("x" * 300))


def _no_folder_may_be_made(folder: Path) -> None:
    (folder / "runs").symlink_to("/proc/runs")


@pytest.mark.parametrize(
    "prepare",
    [
        _file_in_the_way,
        _record_that_is_a_folder,
        _pods_that_are_a_file,
        _name_that_is_too_long,
        _no_folder_may_be_made,
    ],
)
def test_an_unusable_work_directory_is_an_error(prepare: Any, job_body: Any, tmp_path: Path) -> None:
    prepare(tmp_path)
    refused = _invoke(job_body, tmp_path, "--resume")
    assert isinstance(refused.exception, SystemExit), refused.exception
    assert refused.exit_code in (1, 78)
    assert f"the work directory {tmp_path / 'runs'} cannot be" in refused.stderr


@pytest.mark.parametrize(
    "content", ["a: " + "[" * 3000 + "]" * 3000, "a: &a [*a, *b]", "\0", "kind: [", "a: !!int x", "a: !!bool x"]
)
def test_unreadable_yaml_is_an_error_with_a_position(content: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(content)
    for command in ("run", "plan"):
        refused = CliRunner().invoke(main, [command, str(tmp_path / "job.yaml")])
        assert isinstance(refused.exception, SystemExit), refused.exception
        assert refused.exit_code == 78
        assert re.match(rf"{tmp_path / 'job.yaml'}:1:\d+: this is no YAML: ", refused.stderr)


@pytest.mark.parametrize(
    ("path", "resolved"),
    [("llama", "{folder}/llama"), ("/llama", "/llama"), ("s3://bucket/llama", "s3://bucket/llama")],
)
def test_relative_paths_of_weights_start_at_the_job_file(
    path: str, resolved: str, job_body: Any, tmp_path: Path
) -> None:
    start = {"type": "HuggingFace", "huggingFace": {"path": path}}
    if path == "/llama":
        start["huggingFace"]["volume"] = {"persistentVolumeClaim": {"claimName": "llama"}}  # type: ignore[index]
    job_body["spec"]["checkpoint"]["startFrom"] = start
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_body))
    job = read_job(tmp_path / "job.yaml")
    found = job.spec.checkpoint.start_from
    assert found is not None
    assert found.hugging_face is not None
    assert found.hugging_face.path == resolved.format(folder=tmp_path)
    assert ("startFrom.huggingFace.volume" in ignored_fields(job.spec)) == (path == "/llama")


@pytest.fixture
def _does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_trainer.cli.local_run.LocalRun.run", lambda _: None)


@pytest.mark.usefixtures("_does_not_train")
def test_run_without_resume_does_not_overwrite_a_work_directory(job_body: Any, tmp_path: Path) -> None:
    assert _invoke(job_body, tmp_path).exit_code == 0
    again = _invoke(job_body, tmp_path)
    assert again.exit_code == 78
    assert "already holds a run; go on with it by --resume" in again.stderr
    assert _invoke(job_body, tmp_path, "--resume").exit_code == 0


def test_option_trace_names_the_folder_of_every_phase(
    job_body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("pseudoreal_trainer.cli.local_run.LocalRun._run_pod", lambda _, config: seen.append(config))
    assert _invoke(job_body, tmp_path, "--trace", str(tmp_path / "traces")).exit_code == 0
    traces = [(config.phase, config.trace_directory) for config in seen if isinstance(config, PhaseConfig)]
    assert traces == [("pseudo", str(tmp_path / "traces")), ("real", str(tmp_path / "traces"))]


@pytest.mark.usefixtures("_does_not_train")
def test_resume_of_an_earlier_release_is_an_error(job_body: Any, tmp_path: Path) -> None:
    assert _invoke(job_body, tmp_path).exit_code == 0
    record = tmp_path / "runs" / "job.json"
    record.write_text(json.dumps({"uid": "1", "attempt": 1, "job": {}}))
    refused = _invoke(job_body, tmp_path, "--resume")
    assert refused.exit_code == 78
    assert "job.json is not of this release; finish the run with the release that began it" in refused.stderr


MORE = {"name": "more", "until": {"step": 20}, "batch": {"sequences": 6}}
POD = {"env": [{"name": "A", "value": "1"}]}


@pytest.mark.usefixtures("_does_not_train")
@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["phases"][1]["until"].update(step=13),
        lambda spec: spec["phases"].append(MORE),
        lambda spec: (spec["phases"][1]["until"].update(step=13), spec["phases"].append(MORE)),
        lambda spec: spec["phases"][0].update(pod=POD, resources={"limits": {"cpu": "2"}}),
        lambda spec: spec.update(pod=POD, scheduling={"queue": "q"}, suspend=True, restart={"maxRestarts": 9}),
        lambda spec: spec.update(requests=[{"id": "1", "type": "RepeatPhase", "phase": "real"}]),
    ],
)
def test_resume_allows_the_changes_of_a_suspended_job(change: Any, job_body: Any, tmp_path: Path) -> None:
    assert _invoke(job_body, tmp_path).exit_code == 0
    change(job_body["spec"])
    resumed = _invoke(job_body, tmp_path, "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    kept = json.loads((tmp_path / "runs" / "job.json").read_text())["job"]["spec"]
    assert kept["phases"][-1]["name"] == job_body["spec"]["phases"][-1]["name"], (
        "the next run is compared with this one"
    )


@pytest.mark.usefixtures("_does_not_train")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda spec: spec["phases"][0]["until"].update(step=7), "spec.phases[0].until.step 7 (was 6)"),
        (lambda spec: spec["phases"][1]["until"].update(step=11), "spec.phases[1].until.step 11 (was 12)"),
        (lambda spec: spec["phases"][1]["until"].update(tokens=9), "spec.phases[1].until.tokens 9 (was null)"),
        (lambda spec: spec["phases"][1].update(until={"tokens": 10**6}), "spec.phases[1].until.step null (was 12)"),
        (lambda spec: spec["phases"][1]["until"].update(validationLoss="1"), "spec.phases[1].until.validationLoss"),
        (lambda spec: spec["phases"][1].update(workers=3), "spec.phases[1].workers 3 (was 2)"),
        (lambda spec: spec["phases"][1].update(name="other"), 'spec.phases[1].name "other" (was "real")'),
        (lambda spec: spec["phases"].pop(), "spec.phases ["),
        (lambda spec: spec["optimizer"].update(learningRate="1"), 'spec.optimizer.learningRate "1" (was "0.01")'),
    ],
)
def test_resume_rejects_changes_that_affect_the_weights(change: Any, says: str, job_body: Any, tmp_path: Path) -> None:
    assert _invoke(job_body, tmp_path).exit_code == 0
    change(job_body["spec"])
    refused = _invoke(job_body, tmp_path, "--resume")
    assert refused.exit_code == 78
    assert says in refused.stderr
    assert "differs from the run's own" in refused.stderr


@pytest.mark.usefixtures("_does_not_train")
@pytest.mark.parametrize(("recorded", "kept"), [("None", "None"), (None, None)])
def test_resume_keeps_the_state_sharding_that_an_earlier_release_recorded(
    recorded: str | None, kept: str | None, job_body: Any, tmp_path: Path
) -> None:
    """Releases up to 0.3.0 recorded their default None; a run of this release records what the file says."""
    for phase in job_body["spec"]["phases"]:
        phase["parallelism"] = {} if recorded is None else {"stateSharding": recorded}
    assert _invoke(job_body, tmp_path).exit_code == 0
    for phase in job_body["spec"]["phases"]:
        phase["parallelism"] = {}
    job_body["spec"]["phases"].append(MORE)
    for _ in range(2):
        resumed = _invoke(job_body, tmp_path, "--resume")
        assert resumed.exit_code == 0, resumed.stderr
        phases = json.loads((tmp_path / "runs" / "job.json").read_text())["job"]["spec"]["phases"]
        assert [phase["parallelism"].get("stateSharding") for phase in phases] == [kept, kept, None]


def test_resume_allows_more_phases_and_a_later_end(
    job_body: dict[str, Any], tmp_path: Path, train: Any, train_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last phase continues from its end and another phase follows; the result equals one long run. The pods' work
    runs inside this process."""

    def pod(_: LocalRun, config: PhaseConfig | DelinkConfig) -> None:
        ended = delink(config) if isinstance(config, DelinkConfig) else train(config)
        assert ended.outcome == "Succeeded"

    monkeypatch.setattr(LocalRun, "_run_pod", pod)
    spec = job_body["spec"]
    spec["optimizer"]["schedule"] = "Constant"
    second = spec["phases"].pop() | {"workers": 1}
    spec["phases"][0]["until"]["step"] = 4
    short = _invoke(job_body, tmp_path)
    assert short.exit_code == 0, short.output
    spec["phases"][0]["until"]["step"] = 6
    spec["phases"].append(second)
    resumed = _invoke(job_body, tmp_path, "--resume")
    assert resumed.exit_code == 0, resumed.output
    lines = (tmp_path / "runs" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13)), "no step was trained twice"
    train_job("whole")
    for phase in ("pseudo", "real"):
        expected, found = _newest(tmp_path / "whole", phase), _newest(tmp_path / "runs", phase)
        assert found.manifest.step == expected.manifest.step
        for kind in KINDS:
            assert all(np.array_equal(expected.tensor(n, kind), found.tensor(n, kind)) for n in expected.names), phase


@pytest.mark.usefixtures("_does_not_train")
def test_run_names_the_fields_that_it_ignores(job_body: Any, tmp_path: Path) -> None:
    job_body["spec"] |= {"pod": {"image": "x"}, "scheduling": {"queue": "q"}}
    job_body["spec"]["phases"][0] |= {"resources": {"limits": {"cpu": "1"}}, "pod": {"image": "other"}}
    job_body["spec"]["phases"][0]["offload"] = {"volume": {"emptyDir": {}}}
    job_body["spec"]["checkpoint"]["storage"] = {"volume": {"claimName": "c"}}
    said = _invoke(job_body, tmp_path).output
    for name in (
        "spec.pod",
        "spec.scheduling",
        "spec.phases[pseudo].resources",
        "spec.phases[pseudo].pod",
        "spec.phases[pseudo].offload.volume",
        "spec.checkpoint.storage.volume",
    ):
        assert name in said
    assert "spec.network" not in said


def test_stopping_one_of_two_pods_makes_both_save_and_yield(
    job_body: dict[str, Any], config: Any, tmp_path: Path
) -> None:
    """The pod that keeps running must not wait for the torchrun of the stopped one. Before training, the preflight
    covers both pods."""
    job_body["spec"]["network"] = {"preflight": {"mode": "Fail"}}
    first, second = job_body["spec"]["phases"]
    first |= {"workers": 2, "until": {"step": 100_000}}
    second["until"] = {"step": 100_001}
    phase = config(0)
    port = free_port()
    pods = [start_pod(phase, tmp_path / str(rank), rank, 2, environment=meeting(rank, port)) for rank in (0, 1)]
    wait_for("three lines", lambda: _lines(Path(phase.work_directory) / "metrics.jsonl") >= 3, pods[0].said)
    said = "".join(pod.said() for pod in pods)
    assert said.count('"event": "preflight"') == 1
    assert '"node": "node-0"' in said
    assert '"node": "node-1"' in said
    pods[1].process.terminate()
    assert [pod.wait(25) for pod in pods] == [75, 75]
    messages = [pod.message() for pod in pods]
    assert messages[0] == messages[1]
    assert messages[0]["outcome"] == "Yielded"
    assert (tmp_path / "work" / "checkpoints" / messages[0]["checkpoint"] / "manifest.json").exists()


def test_ranks_numbered_by_topology_train_the_same_weights(
    job_body: dict[str, Any], config: Any, tmp_path: Path, train: Any
) -> None:
    """Three pods with one pipeline rank each. The first and the last share a node, so they get adjacent ranks."""
    train(config(0, "whole"))
    job_body["spec"]["phases"][0] |= {"workers": 3, "parallelism": {"pipeline": 3, "schedule": "1F1B"}}
    port = free_port()
    folders = [tmp_path / f"pod-{number}" for number in range(3)]
    pods = [
        start_pod(
            config(0),
            folder,
            number,
            3,
            environment=meeting(number, port)
            | {
                "PSEUDOREAL_NODE_NAME": node,
                "PSEUDOREAL_TOPOLOGY_DOMAIN": "",
                OUTCOME_DIRECTORY: str(folder / "ranks"),
            },
        )
        for number, (folder, node) in enumerate(zip(folders, ("a", "b", "a"), strict=True))
    ]
    assert [pod.wait() for pod in pods] == [0, 0, 0], pods[0].said()
    assert [rank_heartbeats(PodFolder(folder / "ranks"))[0].rank for folder in folders] == [0, 2, 1]
    found = _newest(tmp_path / "work", "pseudo").whole()
    for name, expected in _newest(tmp_path / "whole", "pseudo").whole().items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-11)


def _short(job_body: Any) -> Any:
    """Return the job with its first phase only."""
    spec = job_body["spec"]
    return job_body | {"spec": spec | {"phases": spec["phases"][:1]}}


def test_a_finished_run_leaves_a_picture_and_says_how_to_get_more_text(
    job_body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "an environment" / "pseudoreal"
    own.parent.mkdir()
    own.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(own)])
    done = _invoke(_short(job_body), tmp_path)
    assert done.exit_code == 0, done.output
    (command,) = re.findall(r"^more text: (.*) '...'$", done.stdout, re.MULTILINE)
    program, *arguments = shlex.split(command)
    assert program == str(own)
    assert CliRunner().invoke(main, [*arguments, "It is", "--tokens", "5"]).exit_code == 0
    (picture,) = re.findall(r"^loss curve: (.*)$", done.stdout, re.MULTILINE)
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_a_run_without_matplotlib_says_why_it_has_no_picture(
    job_body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "can_draw", lambda: False)
    done = _invoke(_short(job_body), tmp_path)
    assert done.exit_code == 0, done.output
    assert "loss curve: not drawn, because matplotlib is not installed" in done.stdout


def test_a_picture_that_cannot_be_drawn_does_not_fail_the_run(
    job_body: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: object) -> None:
        raise ImportError("libpng.so: cannot open shared object file")

    monkeypatch.setattr(run_command, "draw_losses", cannot)
    done = _invoke(_short(job_body), tmp_path)
    assert done.exit_code == 0, done.output
    assert "loss curve: not drawn: ImportError: libpng.so: cannot open shared object file" in done.stdout


def test_a_program_on_the_path_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = tmp_path / "own" / "pseudoreal", tmp_path / "other" / "pseudoreal"
    for program in (own, other):
        program.parent.mkdir()
        program.touch(mode=0o755)
    monkeypatch.setattr(sys, "argv", [str(own)])
    for path, named in ((own.parent, "pseudoreal"), (other.parent, str(own)), (tmp_path, str(own))):
        monkeypatch.setenv("PATH", str(path))
        assert run_command._program() == named
    monkeypatch.setattr(sys, "argv", ["/somewhere/command.py"])
    assert run_command._program() == "pseudoreal"


def test_a_local_run_takes_the_machine_s_accelerators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration asks for none, as resources are ignored; the machine is the user's own."""
    monkeypatch.setenv(TAKE_FOUND, "0")
    assert local_run._environment(tmp_path / "termination.json")[TAKE_FOUND] == "1"
