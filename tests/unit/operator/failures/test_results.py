"""A status can hold the results, whatever numbers pods send."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_operator.failures import results
from pseudoreal_operator.observe.reading import progress_of, read_pod, read_report
from pseudoreal_operator.observe.stages import Execution, Stage, StageKind, pending_phases
from pseudoreal_operator.observe.view import LastReport

from tests.unit.operator.support.world import World, make_job

WORLD = World(make_job())
STAGE = Stage(0, "pseudo", StageKind.TRAIN)
EDGES = [0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, True, 0.5, -1e300, 1e6, 1e7, 3.1e28, 1e308]
NUMBERS = st.one_of(
    st.sampled_from([*EDGES, float("inf"), float("-inf"), float("nan")]), st.integers(), st.floats(), st.none()
)
LAYOUT = {
    "schedule": "GPipe",
    "stateSharding": "None",
    "keep": "All",
    "hardware": "h",
    "stepTime": "1",
    "bottleneck": "b",
}
PROGRESS = {
    "phase": "pseudo", "step": 1, "total_steps": 20, "tokens": 1, "loss": 1.0, "learning_rate": 0.1,
    "tokens_per_second": 1.0, "seconds": 1.0, "remaining_seconds": 1.0, "global_cursor": 1,
}  # fmt: skip
RANK = {"rank": 0, "activity": "computing", "seconds": 0.0, "step": 1}
MESSAGE = {"outcome": "Succeeded", "phase": "pseudo", "execution": 1, "checkpoint": "c", "step": 10, "tokens": 5}
LOSSES = ("loss", "startValidationLoss", "validationLoss")


def some(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), NUMBERS, max_size=3)


LAYOUTS = some("pipeline", "replicas", "expertRanks", "microBatches").map(
    lambda drawn: {"pipeline": 1, "replicas": 1, "expertRanks": 1, "microBatches": 1} | LAYOUT | drawn
)


def new_status() -> PseudoRealJobStatus:
    return PseudoRealJobStatus(execution=1, phases=pending_phases(WORLD.job.spec))


def check(status: PseudoRealJobStatus) -> None:
    """Check that the API server accepts the status: its schema is that of the model, and integers have 64 bits."""
    written = status.to_dict()
    PseudoRealJobStatus.model_validate(written)
    text = json.dumps(written, allow_nan=False)
    assert all(-(2**63) <= number < 2**63 for number in integers(json.loads(text)))


def integers(value: Any) -> list[int]:
    if isinstance(value, dict):
        return [number for each in value.values() for number in integers(each)]
    if isinstance(value, list):
        return [number for each in value for number in integers(each)]
    return [value] if isinstance(value, int) else []


@given(
    progress=some(*(name for name in PROGRESS if name != "phase"), "validation_loss", "expert_load_max"),
    rank=some("rank", "seconds", "step", "busySeconds", "savingSeconds"),
    checkpoint=some("step", "seconds"),
    layout=LAYOUTS,
)
@example(progress={"step": 2**62, "total_steps": -1}, rank={"step": 2**63}, checkpoint={}, layout={"pipeline": 2**63})
@example(progress={"tokens": 2**63}, rank={"seconds": 1e11}, checkpoint={"seconds": 1e300}, layout={})
def test_every_report_gives_a_writable_status(
    progress: dict[str, Any], rank: dict[str, Any], checkpoint: dict[str, Any], layout: dict[str, Any]
) -> None:
    parts = {
        "progress": PROGRESS | progress,
        "ranks": [RANK | rank],
        "checkpoint": {"name": "c", "step": 1, "seconds": 1} | checkpoint,
        "layout": layout,
    }
    # A part that is refused must not keep the others from being tried.
    for each in ({"ranks": [], name: part} for name, part in parts.items()):
        try:
            report = read_report(json.dumps(each).encode())
        except ValueError:
            continue
        execution = Execution("pseudo", StageKind.TRAIN, 1)
        last_report = LastReport(execution, 0, "p", first=WORLD.now, last=WORLD.now, report=report)
        check(results.with_reports(new_status(), [last_report], WORLD.now))
        assert all(sign.step < 2**63 and sign.seconds <= 1e10 for sign in report.ranks)
    line = progress_of(json.dumps(PROGRESS | progress | {"event": "progress"}))
    if line is not None:
        check(new_status().model_copy(update={"progress": results.live_progress(line, WORLD.now)}))


def pod(message: dict[str, Any]) -> Any:
    end = {"exitCode": 0, "message": json.dumps(message), "finishedAt": "2030-01-01T00:00:00Z"}
    labels = {"pseudoreal.dev/phase": "pseudo", "pseudoreal.dev/stage": "train", "pseudoreal.dev/execution": "1"}
    states = [{"name": "trainer", "state": {"terminated": end}}]
    return read_pod(
        {"metadata": {"name": "p", "labels": labels}, "status": {"phase": "Succeeded", "containerStatuses": states}}
    )


@given(drawn=some("step", "tokens", "execution", "suspect", *LOSSES), layout=LAYOUTS)
def test_every_termination_message_gives_a_writable_status(drawn: dict[str, Any], layout: dict[str, Any]) -> None:
    message = results.result_of(STAGE, [pod(MESSAGE | drawn | {"layout": layout})])
    if message is None:
        return
    status = results.with_result(new_status(), STAGE, message, "2030-01-01T00:00:00Z")
    last = results.final_progress(WORLD.job.spec, None, message, is_last=False, now=WORLD.now)
    check(status.model_copy(update={"progress": last}))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(
    ("loss", "shown"),
    [
        (3.1e28, "3.1e+28"),
        (float("nan"), None),
        (float("inf"), None),
        (2.5, "2.5000"),
        (-1e308, "-1e+308"),
        (999999.0, "999999.0000"),
    ],
)
def test_phase_completes_with_any_loss(name: str, loss: float, shown: str | None) -> None:
    message = results.result_of(STAGE, [pod(MESSAGE | {name: loss})])
    assert message is not None
    phase = results.with_result(new_status(), STAGE, message, None).phases[0]
    assert phase.state == "Complete"
    assert phase.to_dict().get(name) == shown


@pytest.mark.parametrize("index", ["9" * 5000, "9" * 30])
def test_huge_completion_index_does_not_fail_a_pass(index: str) -> None:
    labels = {"pseudoreal.dev/phase": "real", "pseudoreal.dev/stage": "train", "pseudoreal.dev/execution": "3"}
    annotations = {"batch.kubernetes.io/job-completion-index": index}
    containers = [{"name": "trainer", "env": [{"name": "PET_NNODES", "value": index}]}]
    body = {"metadata": {"name": "p", "labels": labels, "annotations": annotations}, "spec": {"containers": containers}}
    assert (read_pod(body).index, read_pod(body).workers) == (0, 0)
