"""The operator benchmark: reading of an audit log, results of simulated pods, and its target bars."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.names import LABEL_EXECUTION, LABEL_PHASE, LABEL_STAGE
from pseudoreal_api.wire.messages import TerminationMessage

from benchmarks.operator.audit import (
    JOB_CONTROLLER,
    AuditLog,
    Reaction,
    Request,
    job_name,
    longest_gap,
    parse,
    per_kind,
    percentile,
    reactions,
)
from benchmarks.operator.results import (
    BARS,
    Quiet,
    Record,
    Records,
    on_line,
    section,
)
from benchmarks.operator.simulator import OURS, ended
from benchmarks.operator.usage import Usage, parse_busy
from benchmarks.operator.usage import parse as parse_usage
from tests.support.names import OPERATOR
from tests.unit.benchmarks.fake_results import operator_record as record

JOB = job_name(7)


def entry(**changes: Any) -> dict[str, Any]:
    made = {
        "stage": "ResponseComplete",
        "requestReceivedTimestamp": "2026-01-02T03:04:05.000000Z",
        "stageTimestamp": "2026-01-02T03:04:05.250000Z",
        "user": {"username": OPERATOR},
        "verb": "list",
        "requestURI": f"/api/v1/namespaces/load/pods?limit=100&labelSelector=pseudoreal.dev%2Fjob-name%3D{JOB}",
        "objectRef": {"resource": "pods", "namespace": "load"},
        "responseStatus": {"code": 200},
    }
    return made | changes


def request(
    done: float, verb: str, resource: str, user: str = OPERATOR, ends_pod: bool = False, name: str = ""
) -> Request:
    return Request(done - 0.1, done, user, verb, resource, JOB, ends_pod, name)


def end(done: float, pod: str) -> Request:
    return request(done, "patch", "pods/status", "admin", ends_pod=True, name=pod)


def test_a_request_is_about_the_job_that_its_selector_or_its_name_has() -> None:
    listed = parse(entry())
    assert listed is not None
    assert (listed.kind, listed.job, round(listed.done - listed.begun, 3)) == ("list pods", JOB, 0.25)
    what = {"resource": "pseudorealjobs", "subresource": "status", "name": JOB}
    written = parse(entry(verb="patch", objectRef=what, requestURI="/apis/…"))
    assert written is not None
    assert (written.kind, written.job) == ("patch pseudorealjobs/status", JOB)
    assert parse(entry(stage="ResponseStarted")) is None, "a watch is logged again at its end"


def test_renewals_of_the_lease_and_watches_are_not_for_jobs() -> None:
    log = [request(1.0, "get", "pods"), request(1.0, "patch", "leases"), request(1.0, "watch", "pods")]
    assert per_kind([*log, request(2.0, "get", "pods", user=JOB_CONTROLLER)], 2) == {"get pods": 0.5}


def test_a_log_is_read_on_from_where_the_last_look_ended(tmp_path: Path) -> None:
    path, line = tmp_path / "audit.log", json.dumps(entry()) + "\n"
    path.write_text(line + line[:40])
    log = AuditLog(path)
    assert len(log.requests()) == 1
    path.write_text(line + line)
    assert len(log.requests()) == 2


def test_the_answer_to_an_execution_is_the_next_child_and_to_the_last_one_the_last_status() -> None:
    story = [
        request(0.0, "create", "jobs"),
        end(10.0, f"{JOB}-pseudo-abcdef-e1-0-zzzzz"),
        request(10.2, "patch", "pseudorealjobs/status"),  # reports that the pod is no longer ready
        request(11.0, "update", "jobs/status", JOB_CONTROLLER),
        request(11.5, "create", "jobs"),
        end(20.0, f"{JOB}-real-abcdef-e1-0-zzzzz"),
        end(20.5, f"{JOB}-real-abcdef-e1-1-yyyyy"),
        request(20.7, "patch", "pseudorealjobs/status"),
        request(21.5, "update", "jobs/status", JOB_CONTROLLER),
        request(22.0, "patch", "pseudorealjobs/status"),
    ]
    assert [*reactions(story)] == [Reaction(1.5, 1.0), Reaction(1.5, 1.0)]


def test_the_longest_gap_reaches_to_both_ends() -> None:
    renewals = [request(moment, "patch", "leases") for moment in (2.0, 4.0)]
    assert longest_gap(renewals, 0.0, 5.0) == 2.0
    assert longest_gap(renewals, 0.0, 9.0) == 5.0


@pytest.mark.parametrize(("share", "value"), [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0)])
def test_percentiles(share: float, value: float) -> None:
    assert percentile([float(number) for number in range(100, 0, -1)], share) == value
    assert percentile([], share) == 0.0


@pytest.mark.parametrize(("stage", "checkpoint"), [("train", "real-20"), ("delink", "real-10")])
def test_a_pod_ends_with_the_result_of_its_stage(stage: str, checkpoint: str) -> None:
    labels = {LABEL_STAGE: stage, LABEL_PHASE: "real", LABEL_EXECUTION: "3"}
    (container,) = ended(OURS, labels, datetime.now(UTC))["containerStatuses"]
    message = TerminationMessage.model_validate_json(container["state"]["terminated"]["message"])
    assert (message.outcome, message.execution, message.checkpoint) == ("Succeeded", 3, checkpoint)


def test_a_process_may_have_blanks_and_brackets_in_its_name() -> None:
    stat = "12 (a ) b) S " + " ".join(str(number) for number in range(4, 53))
    assert parse_usage("VmPeak:\t 9 kB\nVmHWM:\t    2048 kB\n", stat, ticks=10) == Usage(2**21, 2.9)


def test_a_processor_that_waits_for_a_disk_is_not_busy() -> None:
    assert parse_busy("cpu  10 20 30 1000 2000 1 2 3 0 0\ncpu0 1", ticks=2) == 33.0


def verdicts(*records: Record) -> list[str]:
    return [bar.verdict(records).split(":")[0].strip("*") for bar in BARS]


def test_a_bar_at_5000_jobs_is_reached_only_there_and_missed_anywhere() -> None:
    assert verdicts(record(200)) == ["reached", *["not measured at 5,000 jobs"] * 2, "reached", "reached"]
    assert verdicts(record(200), record(5000)) == ["reached"] * 5
    too_much = record(
        1000, peak_bytes=300_000_000, quiet=Quiet(seconds=1, for_jobs={"get x": 2}, lease=1, processor_share=0)
    )
    assert verdicts(record(200), too_much)[:2] == ["not reached", "not reached"]


def test_the_section_says_what_is_measured_and_what_is_reckoned() -> None:
    text = section([record(200), record(1000)])
    assert "5,000 would take 150 MB and be looked at after 50 s" in text
    assert "| get pods | 3.00 | 3.00 |" in text
    assert "not quiet" not in text
    assert "not quiet" in section([record(200, others=0.5)])
    assert "would take" not in section([record(200), record(5000)])
    assert on_line([(1, 1.0), (3, 2.0)], 5) == 3.0


def test_a_new_record_takes_the_place_of_that_of_as_many_jobs() -> None:
    found = Records(records=[record(200), record(5000)]).with_record(record(1000)).with_record(record(200, others=0.5))
    assert [(r.jobs, r.others) for r in found.records] == [(200, 0.5), (1000, 0.05), (5000, 0.05)]
