"""Restarts, descent of checkpoints and differences of specs."""

from typing import Any

import pytest
from pseudoreal_api.spec.logging import Logging
from pseudoreal_trainer.checkpoint.manifest import Link
from pseudoreal_trainer.report.differences import ABSENT, MOST_DIFFERENCES, differences_of
from pseudoreal_trainer.report.drawings import draw_lineage, draw_plan, draw_time_line
from pseudoreal_trainer.report.restarts import restarts_of, runs_of
from pseudoreal_trainer.report.step_plan import step_picture
from pseudoreal_trainer.report.steps import read_steps

from tests.unit.trainer.checkpoint.support.by_hand import manifest_of
from tests.unit.trainer.report.support.jobs import NOON, entry, job, line, started

NO_STEPS = read_steps([])


def test_a_restart_names_the_pod_at_fault_and_not_the_ones_that_lost_it(config: Any) -> None:
    """The pods that lose a peer end first: only the pod at fault waits for its crash file."""
    history = [
        started(config(0), 0),
        entry("Ended", 50, outcome="Failed", peer_lost=True, message="connection closed", pod="tiny-0", ranks=[0, 1]),
        entry("Ended", 51, outcome="Failed", message="rank 3 crashed", pod="tiny-1", node="gpu-1", ranks=[2, 3]),
        started(config(0), 60, step=40, execution=2, checkpoint="pseudo-00000040"),
    ]
    (found,) = restarts_of(history, NO_STEPS)
    assert (found.cause, found.ranks, found.pod, found.node) == ("rank 3 crashed", (2, 3), "tiny-1", "gpu-1")
    assert (found.execution, found.step, found.checkpoint) == (2, 40, "pseudo-00000040")


def test_a_lost_node_is_not_blamed_on_the_pod_that_tells_of_it(config: Any) -> None:
    history = [
        started(config(0), 0),
        entry("Ended", 50, outcome="Failed", peer_lost=True, message="connection closed", suspect=7),
        started(config(0), 60, step=40, execution=2),
    ]
    (found,) = restarts_of(history, NO_STEPS)
    assert found.cause == "connection closed (as a pod saw it that lost the one at fault)"
    assert (found.pod, found.node, found.ranks, found.suspect) == (None, None, (), 7)


def test_a_restart_without_any_word_is_said_to_be_not_recorded(config: Any) -> None:
    history = [started(config(0), 0), started(config(0), 60, step=40, execution=2)]
    (found,) = restarts_of(history, NO_STEPS)
    assert found.cause.startswith("not recorded")
    first, second = runs_of(history)
    assert (first.end, first.outcome, second.end) == (NOON + 60, None, None)


def test_a_restart_in_place_has_its_number_and_cause(config: Any) -> None:
    history = [
        started(config(0), 0),
        entry("RestartedInPlace", 30, restart=1, message="local rank 0 ended", outcome="Failed", ranks=[0]),
        started(config(0), 35, step=10, restart=1),
        entry("Ended", 90, outcome="Succeeded"),
    ]
    (found,) = restarts_of(history, NO_STEPS)
    assert (found.restart, found.cause, found.outcome) == (1, "local rank 0 ended", "Failed")
    assert [(run.restart, run.outcome) for run in runs_of(history)] == [(0, "Failed"), (1, "Succeeded")]


def test_the_next_phase_is_no_restart(config: Any) -> None:
    history = [
        *(started(config(0), 0), entry("Ended", 6, outcome="Succeeded")),
        entry("Ended", 7, "real", stage="delink", outcome="Succeeded"),
        *(started(config(1), 8, step=6), entry("Ended", 20, "real", outcome="Succeeded")),
    ]
    assert restarts_of(history, NO_STEPS) == []
    assert [(run.phase, run.stage) for run in runs_of(history)] == [
        ("pseudo", "train"),
        ("real", "delink"),
        ("real", "train"),
    ]


@pytest.mark.parametrize("time", [-1e300, 1e300, float("nan"), float("inf"), 0.0])
def test_a_time_that_cannot_be_is_left_out(time: float, config: Any) -> None:
    bad = started(config(0), 0).model_copy(update={"time": time})
    history = [started(config(0), 0), bad]
    assert len(runs_of(history)) == 1
    assert draw_time_line(runs_of(history)) is not None


def _link(folder: str) -> Link:
    return Link(folder=folder, blocks=[0, 0], first_moment_divisor=1, second_moment_divisor=1)


def test_the_descent_shows_links_kept_and_removed_checkpoints() -> None:
    cost = {"step": 5, "bytes": 100, "seconds": 2.0, "bytes_per_second": 50.0, "stall_seconds": 0.5}
    heads = [
        manifest_of(10, parent="pseudo-00000005", phase_complete=True),
        manifest_of(10, "real", parent="pseudo-00000010", delinked=True, link=_link("pseudo-00000010")),
        manifest_of(15, "real", parent="real-00000010"),
    ]
    lines = [*(line(step) for step in range(1, 6)), line(6, checkpoint=cost)]
    lineage = job(lines, [each.head for each in heads]).lineage
    found = {each.name: each for each in lineage.checkpoints}
    assert list(found) == ["pseudo-00000005", "pseudo-00000010", "real-00000010", "real-00000015"]
    gone = found["pseudo-00000005"]
    assert (gone.is_kept, gone.why, gone.bytes, gone.stall_seconds) == (False, "removed by retention", 100, 0.5)
    assert found["pseudo-00000010"].why == "kept: another checkpoint refers to its files"
    assert found["real-00000010"].link == "pseudo-00000010"
    assert found["real-00000015"].why == "kept by checkpoint.keepLast or keepEvery"
    assert {(edge.source, edge.target, edge.is_link) for edge in lineage.edges} == {
        ("pseudo-00000005", "pseudo-00000010", False),
        ("pseudo-00000010", "real-00000010", True),
        ("real-00000010", "real-00000015", False),
    }
    drawing = draw_lineage(lineage)
    assert drawing is not None
    assert [dot.style for dot in drawing.dots] == ["gone", "kept", "linked", "kept"]
    assert sum("link" in stroke.style for stroke in drawing.strokes) == 1


def test_a_manifest_that_contradicts_itself_has_no_shape() -> None:
    bad = manifest_of(5)
    bad = bad.model_copy(update={"sharing": bad.sharing.model_copy(update={"blocks": 7})})
    (found,) = job([line(1)], [bad.head]).lineage.checkpoints
    assert found.shape is None


def test_differences_are_of_fields_and_never_of_places_or_sinks(config: Any) -> None:
    first = config(0)
    second = first.model_copy(
        update={
            "work_directory": "/elsewhere",
            "execution": 9,
            "logging": Logging.model_validate(
                {"sinks": [{"type": "MLflow", "mlflow": {"url": "https://name:secret@host"}}]}
            ),
            "batch": first.batch.model_copy(update={"sequences": 12}),
        }
    )
    third = [job([line(1)], history=[]).phases]
    jobs = [job([line(1)], history=[started(each, 0)]).phases for each in (first, second)]
    assert [(each.field, each.values) for each in differences_of(jobs)] == [
        ("phases[pseudo].batch.sequences", ("6", "12"))
    ]
    with_unknown = differences_of([*jobs, *third])
    assert {each.values[2] for each in with_unknown} == {ABSENT}
    assert len(with_unknown) <= MOST_DIFFERENCES


def test_the_plan_of_a_step_has_each_record_of_the_plan(config: Any) -> None:
    from pseudoreal_trainer.plan.lower import step_plan
    from pseudoreal_trainer.plan.memory.from_config import phase_layout

    picture = step_picture(config(1), "cpu")
    assert picture is not None
    passes = sum(stream.counts["Forward"] for stream in picture.streams)
    planned = [record for record in step_plan(phase_layout(config(1), "cpu"))[0] if type(record).__name__ == "Forward"]
    assert passes == len(planned)
    drawing = draw_plan(picture)
    assert max(box.x + box.width for box in drawing.boxes) <= drawing.width
    assert {"forward", "backward", "fetch", "reduce", "update"} <= {box.style for box in drawing.boxes}


def test_a_plan_too_large_for_a_picture_is_named(config: Any) -> None:
    large = config(0)
    large = large.model_copy(update={"batch": large.batch.model_copy(update={"micro_batches": 10**6})})
    found = job([line(1)], history=[started(large, 0)])
    assert found.pictures == []
    assert found.without_picture == ["pseudo"]
