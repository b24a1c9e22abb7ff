"""Parsing of the API server's JSON."""

import json
from typing import Any

import pytest
from pseudoreal_api.wire.layout import ChosenLayout
from pseudoreal_api.wire.messages import ProgressReport, TerminationMessage
from pseudoreal_api.wire.reports import PodReport, RankReport, SavedCheckpoint
from pseudoreal_operator.observe import reading
from pseudoreal_operator.observe.reading import (
    belongs_to,
    is_of_another,
    newest_report,
    read_job,
    read_pod,
    read_report,
)
from pseudoreal_operator.observe.stages import Execution, StageKind
from pseudoreal_operator.observe.view import ChildJob, JobState, Pod, PodPhase
from pydantic_core import from_json

LABELS = {"pseudoreal.dev/phase": "real", "pseudoreal.dev/stage": "train", "pseudoreal.dev/execution": "3"}
EXECUTION = Execution("real", StageKind.TRAIN, 3)
JOB = ChildJob("the-job", EXECUTION, JobState.ACTIVE)


def pod(**status: Any) -> Pod:
    annotations = {"batch.kubernetes.io/job-completion-index": "1"}
    return read_pod({"metadata": {"name": "p", "labels": LABELS, "annotations": annotations}, "status": status})


def job(*conditions: tuple[str, str], **metadata: Any) -> ChildJob:
    found = [{"type": kind, "status": status, "lastTransitionTime": "t"} for kind, status in conditions]
    return read_job({"metadata": {"name": "j", "labels": LABELS} | metadata, "status": {"conditions": found}})


def test_read_job_reads_the_state_of_a_job() -> None:
    assert job().state is JobState.ACTIVE
    assert job(("FailureTarget", "True")).state is JobState.ACTIVE, "its pods still end"
    assert job(("Complete", "False")).state is JobState.ACTIVE
    assert job(("SuccessCriteriaMet", "True"), ("Complete", "True")).state is JobState.COMPLETE
    failed = job(("Failed", "True"), deletionTimestamp="now")
    assert (failed.state, failed.ended, failed.deleting, failed.execution) == (JobState.FAILED, "t", True, EXECUTION)


def child(owner: str = "PseudoRealJob one", **labels: str) -> dict[str, Any]:
    named = {f"pseudoreal.dev/{key.replace('_', '-')}": value for key, value in labels.items()}
    kind, uid = owner.split()
    owners = [{"kind": "Node", "uid": "n"}, {"kind": kind, "uid": uid, "controller": True}]
    return {"metadata": {"name": "c", "labels": named, "ownerReferences": owners}}


def test_child_needs_all_labels_of_its_job() -> None:
    ours = child(job_uid="one", phase="real", stage="train", execution="3")
    old = child(job_uid="two", phase="real", stage="train", execution="3")
    assert (belongs_to("one", ours), is_of_another("one", ours)) == (True, False)
    assert (belongs_to("one", old), is_of_another("one", old)) == (False, True)
    # Somebody's own, labelled so that its logs come with the others'.
    for stranger in (child(job_name="j"), child(job_name="j", job_uid="one"), {"metadata": {"name": "c"}}):
        assert (belongs_to("one", stranger), is_of_another("one", stranger)) == (False, False)


OURS = {"job_uid": "one", "phase": "real", "stage": "train", "execution": "3"}


def test_child_needs_its_owner_reference() -> None:
    assert belongs_to("one", child(**OURS))
    assert belongs_to("one", child("Job any", **OURS)), "a pod; its Job may be gone already"
    for owner in ("PseudoRealJob two", "ReplicaSet one"):
        assert not belongs_to("one", child(owner, **OURS))
    nobodys = child(**OURS)
    for owners in ([], None, [{"kind": "PseudoRealJob", "uid": "one"}]):
        nobodys["metadata"]["ownerReferences"] = owners
        assert not belongs_to("one", nobodys)


def test_a_child_belongs_to_its_execution() -> None:
    assert read_job(child(**OURS)).execution == Execution("real", StageKind.TRAIN, 3)
    assert belongs_to("one", child(**OURS))


@pytest.mark.parametrize(
    "labels",
    [
        *({"execution": number} for number in ("x", "-1", "0", "1.5", "٣", "9" * 30, " 3")),
        {"execution": "three"},
        {"stage": "serve"},
    ],
    ids=str,
)
def test_objects_with_invalid_labels_belong_to_no_job(labels: dict[str, str]) -> None:
    """One label of one pod must not fail every pass over the job, nor give its next execution the number one
    million."""
    assert not belongs_to("one", child("Job any", **OURS | labels))


@pytest.mark.parametrize("index", ["x", "-1", "", "1.0"])
def test_invalid_completion_index_is_read_as_0(index: str) -> None:
    annotations = {"batch.kubernetes.io/job-completion-index": index}
    assert read_pod({"metadata": {"name": "p", "labels": LABELS, "annotations": annotations}}).index == 0


def test_messages_of_a_later_release_are_read() -> None:
    said = TerminationMessage(outcome="Failed", phase="real", execution=3, step=7, checkpoint="real-7", message="why")
    text = said.to_json().replace('"Failed"', '"Paused"')
    end = {"exitCode": 76, "message": text}
    read = pod(phase="Failed", containerStatuses=[{"name": "trainer", "state": {"terminated": end}}]).termination
    assert read
    assert read.message
    assert (read.message.outcome, read.message.checkpoint, read.message.exit_code) == ("Paused", "real-7", 1)
    report = PodReport(ranks=[RankReport(rank=0, activity="computing", seconds=0, step=3)])
    later = read_report(report.to_json().replace('"computing"', '"validating"').encode())
    assert [sign.activity for sign in later.ranks] == ["validating"]


def test_a_pod_on_a_node_that_does_not_answer_may_be_running() -> None:
    assert pod(phase="Unknown").is_alive
    assert pod(phase="Pending").is_alive
    assert not pod(phase="Failed").is_alive
    assert pod(phase="Running").index == 1


def test_only_our_own_termination_messages_are_messages() -> None:
    def text(message: str) -> Pod:
        end = {"exitCode": 1, "message": message}
        return pod(phase="Failed", containerStatuses=[{"name": "trainer", "state": {"terminated": end}}])

    ours = TerminationMessage(outcome="Failed", phase="real", execution=3, message="why").to_json()
    for said in (ours, ours.replace("{", '{"ofALaterRelease": 1, ', 1)):
        read = text(said).termination
        assert read
        assert read.message
        assert read.message.message == "why"
    traceback = text("Traceback: ...").termination
    assert traceback
    assert (traceback.message, traceback.text) == (None, "Traceback: ...")


def test_a_sidecar_s_end_is_not_the_trainer_s() -> None:
    end = {"terminated": {"exitCode": 0}}
    assert pod(phase="Running", containerStatuses=[{"name": "sidecar", "state": end}]).termination is None


def test_read_pod_reads_disruptions() -> None:
    target = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI", "message": "drained"}
    assert pod(phase="Failed", conditions=[target]).disruption == "EvictionByEvictionAPI: drained"
    assert pod(phase="Failed", conditions=[target | {"status": "False"}]).disruption is None
    assert pod(phase="Unknown", reason="NodeLost").disruption == "NodeLost"


LINE: dict[str, Any] = {
    "event": "progress",
    "phase": "real",
    "total_steps": 20,
    "tokens": 1,
    "loss": 1.0,
    "learning_rate": 0.1,
    "tokens_per_second": 1.0,
    "seconds": 1.0,
    "remaining_seconds": 1.0,
    "global_cursor": 1,
    "level": "info",
}


def test_the_newest_progress_line_counts() -> None:
    lines = [json.dumps(LINE | {"step": 1}), json.dumps(LINE | {"step": 2}), "plain text", '{"event": "sample"}']
    report = newest_report("\n".join([*lines, '{"event": "progress", "step": 3, "tok', "[1]"]))
    assert report
    assert report.step == 2
    assert newest_report("") is None


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        *(json.dumps(LINE | {"step": 1} | odd) for odd in ({"step": 10**30}, {"step": -1}, {"tokens": 2**63})),
        *(json.dumps(LINE | {"step": 1} | odd) for odd in ({"loss": float("nan")}, {"remaining_seconds": 1e300})),
        "\x00\ufffd\u2028",
    ],
    ids=lambda line: line[:20],
)
def test_no_log_line_raises(line: str) -> None:
    """Numbers that no status can hold are no progress."""
    assert newest_report(line) is None
    report = newest_report("\n".join([json.dumps(LINE | {"step": 5}), line]))
    assert report is not None
    assert report.step == 5


@pytest.mark.parametrize("separator", ["\n", "\x0b", "\x1e", "\x85", "\u2028"])
def test_no_more_lines_are_parsed_than_were_requested(separator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ends lines at more characters than Kubernetes does."""
    lengths: list[int] = []

    def parse(line: str) -> Any:
        lengths.append(len(line))
        return from_json(line)

    monkeypatch.setattr(reading, "from_json", parse)
    assert newest_report(f"{separator * 800_000}x") is None
    assert len(lengths) <= reading.LOG_LINES
    assert sum(lengths) <= 800_001


def test_no_more_values_of_a_log_are_parsed_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []

    def parse(line: str) -> Any:
        parsed.append(line.count(","))
        return from_json(line)

    monkeypatch.setattr(reading, "from_json", parse)
    assert newest_report("\n".join(["[" + "[]," * 7_000 + "1]"] * 50)) is None
    assert parsed == [7_000]


@pytest.mark.parametrize("end", ["", "\n"])
def test_newest_lines_of_a_log_are_parsed(end: str) -> None:
    lines = [json.dumps(LINE | {"step": 1}), *["text"] * (reading.LOG_LINES - 1)]
    report = newest_report("\n".join(["text", *lines]) + end)
    assert report is not None
    assert report.step == 1
    assert newest_report("\n".join([*lines, "text"]) + end) is None


def test_parts_of_progress_that_no_pass_reads_are_dropped() -> None:
    """Their length has no bound, and reports are kept."""
    samples = [{"prompt": "p", "text": "t"}]
    lists = {"gradient_correlations": [0.5] * 1000, "samples": samples, "waits": {"data": 1.0}}
    sets = {"validation_losses": {"a": 1.0}, "bits_per_byte": {"a": 1.0}}
    line = LINE | {"step": 1, "validation_loss": 2.0} | lists | sets
    plain = ProgressReport.model_validate(LINE | {"step": 1, "validation_loss": 2.0})
    assert newest_report(json.dumps(line)) == plain
    sent = read_report(json.dumps({"progress": line | {"phase": "x" * 10_000}}).encode()).progress
    assert sent is not None
    assert sent.model_copy(update={"phase": plain.phase}) == plain
    assert len(sent.phase) < 200


def test_texts_of_pods_are_sanitized() -> None:
    message = TerminationMessage(outcome="Failed", phase="real", execution=3, message="a\x1bb", checkpoint="c\x00")
    state = {"terminated": {"exitCode": 1, "message": message.to_json(), "reason": "E\x07"}}
    conditions = [{"type": "DisruptionTarget", "status": "True", "reason": "R\x07", "message": "m\x07"}]
    read = pod(phase="Failed", conditions=conditions, containerStatuses=[{"name": "trainer", "state": state}])
    assert read.termination
    assert read.termination.message
    assert (read.termination.message.message, read.termination.message.checkpoint) == ("a␛b", "c␀")
    assert (read.termination.reason, read.disruption) == ("E␇", "R␇: m␇")
    ranks = [RankReport(rank=0, activity="computing", seconds=0, step=1, doing="d\x07")]
    sent = PodReport(ranks=ranks, checkpoint=SavedCheckpoint(name="n\x07", step=1, seconds=0))
    report = read_report(sent.to_json().encode())
    assert (report.ranks[0].doing, report.checkpoint and report.checkpoint.name) == ("d␇", "n␇")


def test_texts_of_layouts_are_sanitized() -> None:
    said: dict[str, Any] = dict.fromkeys(("pipeline", "replicas", "expert_ranks", "micro_batches"), 1)
    said |= {"schedule": "GPipe", "state_sharding": "Full", "keep": "Nothing"}
    layout = ChosenLayout(hardware="h\x1b[2J", step_time="1\x07", bottleneck="b\x7f", **said)
    report = read_report(PodReport(layout=layout).to_json().encode())
    message = TerminationMessage(outcome="Succeeded", phase="real", execution=3, layout=layout)
    state = {"terminated": {"exitCode": 0, "message": message.to_json()}}
    read = pod(phase="Succeeded", containerStatuses=[{"name": "trainer", "state": state}])
    assert read.termination
    assert read.termination.message
    for found in (report.layout, read.termination.message.layout):
        assert found
        assert (found.hardware, found.step_time, found.bottleneck) == ("h␛[2J", "1␇", "b␡")


def test_pod_phases_equal_those_of_kubernetes() -> None:
    assert {phase.value for phase in PodPhase} == {"Pending", "Running", "Succeeded", "Failed"}
