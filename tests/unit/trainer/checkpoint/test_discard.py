"""A phase that is trained again: its earlier checkpoints are discarded, and the result is the same as the first
time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.resolved.config import DelinkConfig, DiscardConfig, PhaseConfig
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.pod import _with_newest_checkpoint
from pseudoreal_trainer.errors import TrainingError

from tests.unit.trainer.checkpoint.support.by_hand import save

UID = "11111111-2222"


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "work", UID)


Again = Callable[..., PhaseConfig]


@pytest.fixture
def again(config: Any) -> Again:
    """Return a function that makes a phase of execution 2, which discards checkpoints of execution 1 from a step on."""

    def make(from_step: int, index: int = 0) -> PhaseConfig:
        rule = DiscardConfig(before_execution=2, from_step=from_step)
        found: PhaseConfig = config(index, execution=2)
        changed: PhaseConfig = found.model_copy(update={"discards": {found.phase: [rule]}})
        return changed

    return make


def _losses(config: PhaseConfig) -> list[tuple[int, float]]:
    lines = (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()
    return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


class Steps:
    """Counts the training steps."""

    made = 0

    def __call__(self) -> bool:
        self.made += 1
        return False


@pytest.mark.parametrize(("from_step", "made"), [(0, 11), (7, 6), (11, 1)])
def test_a_phase_is_trained_again(
    from_step: int, made: int, job_body: Any, config: Any, again: Again, train: Any, store: Any
) -> None:
    job_body["spec"]["phases"][0]["until"]["step"] = 11
    first, steps = train(config(0)), Steps()
    losses = _losses(config(0))
    message = train(again(from_step), steps)
    assert steps.made == made
    assert message.model_copy(update={"execution": 1, "digest": first.digest}) == first
    assert message.digest != first.digest
    assert _losses(config(0)) == losses
    executions = {m.step: m.execution for m in store.committed("pseudo")}
    assert executions == {step: 2 if step >= max(from_step, 1) else 1 for step in (5, 10, 11)}


def test_a_phase_that_was_trained_again_is_not_trained_a_third_time(config: Any, again: Again, train: Any) -> None:
    train(config(0))
    train(again(0))
    steps, third = Steps(), again(0).model_copy(update={"execution": 3})
    assert train(third, steps).outcome == "Succeeded"
    assert steps.made == 0


def test_what_later_phases_made_goes_with_the_first_save(config: Any, train_job: Any, train: Any, store: Any) -> None:
    """Otherwise a job that continues this one would use them, if this one were given up before it trains these phases
    again."""
    train_job("work")
    assert store.committed("real")
    rule = DiscardConfig(before_execution=2, from_step=0)
    again = config(0, execution=2).model_copy(update={"discards": {"pseudo": [rule], "real": [rule]}})
    made = iter(range(100))
    train(again, lambda: next(made) >= 2)
    assert [(m.phase, m.step, m.execution) for m in store.committed()] == [("pseudo", 3, 2)]


def test_what_is_left_over_is_removed_and_what_somebody_writes_meanwhile_is_not(
    config: Any, train: Any, store: Any
) -> None:
    left_over, written = store.folder / "pseudo-00000099", store.folder / "real-00000006"
    left_over.mkdir(parents=True)

    def write() -> bool:
        written.mkdir(exist_ok=True)
        return False

    train(config(0), write)
    assert not left_over.exists()
    assert written.exists()


def test_a_later_phase_goes_on_from_its_start(
    config: Any, delink_of: Any, again: Again, train: Any, store: Any
) -> None:
    train(config(0))
    delink(delink_of(1))
    first, steps = train(config(1)), Steps()
    message = train(again(7, index=1), steps)
    assert (steps.made, message.step, message.loss) == (6, first.step, first.loss)
    assert {m.step: m.execution for m in store.committed("real")} == {6: 1, 10: 2, 12: 2}


def test_a_later_phase_of_which_nothing_is_left_needs_its_delink(
    config: Any, delink_of: Any, again: Again, train: Any
) -> None:
    train(config(0))
    delink(delink_of(1))
    with pytest.raises(TrainingError, match="the delink from the phase before has not run"):
        train(again(0, index=1))


def _delink_again(delink_of: Any, from_step: int = 0) -> DelinkConfig:
    rule = DiscardConfig(before_execution=2, from_step=from_step)
    discards = {"pseudo": [rule], "real": [rule]}
    changed: DelinkConfig = delink_of(1).model_copy(update={"execution": 2, "discards": discards})
    return changed


def test_a_delink_reads_what_was_trained_again(config: Any, delink_of: Any, train: Any, store: CheckpointStore) -> None:
    """The repeated end is at an earlier step than the old end, which still exists."""
    train(config(0))
    old = store.whole(store.committed("pseudo")[-1])
    weights = {name: array * 2 for name, array in store.reader(old).whole().items()}
    save(store, old.model_copy(update={"step": 4, "execution": 2}), weights)
    assert delink(delink_of(1)).checkpoint == "real-00000006"
    assert delink(_delink_again(delink_of)).checkpoint == "real-00000004"
    found = _manifest(store, "real-00000004")
    assert (found.parent, found.execution) == ("pseudo-00000004", 2)
    with pytest.raises(TrainingError, match="phase pseudo has no complete checkpoint"):
        delink(
            _delink_again(delink_of).model_copy(
                update={"discards": {"pseudo": [DiscardConfig(before_execution=9, from_step=0)]}}
            )
        )


def test_a_delinked_checkpoint_that_is_discarded_is_made_anew(
    config: Any, delink_of: Any, train: Any, store: CheckpointStore
) -> None:
    train(config(0))
    delink(delink_of(1))
    keep = delink_of(1).model_copy(update={"execution": 2})
    delink(keep)
    assert _manifest(store, "real-00000006").execution == 1, "without a reason it is only verified"
    delink(keep.model_copy(update={"discards": {"real": [DiscardConfig(before_execution=2, from_step=6)]}}))
    assert _manifest(store, "real-00000006").execution == 2


def test_a_whole_job_from_its_first_phase_again(
    config: Any, delink_of: Any, again: Again, train: Any, store: CheckpointStore
) -> None:
    """Checkpoints derived from the old end of the phase are removed once the end is replaced."""
    train(config(0))
    delink(delink_of(1))
    first = train(config(1))
    losses = _losses(config(0))
    train(again(0))
    assert [m.name for m in store.committed()] == [
        "pseudo-00000005",
        "pseudo-00000006",
        "real-00000010",
        "real-00000012",
    ]
    delink(_delink_again(delink_of))
    message = train(again(0, index=1))
    assert (message.step, message.loss, message.validation_loss) == (first.step, first.loss, first.validation_loss)
    assert _losses(config(0)) == losses
    assert {m.execution for m in store.committed()} == {2}
    for manifest in store.committed():
        store.verify(manifest)


def test_a_pod_that_knows_nothing_names_no_discarded_checkpoint(config: Any, again: Again, train: Any) -> None:
    train(config(0))
    silent = TerminationMessage(outcome="Failed", phase="pseudo", execution=2)
    assert _with_newest_checkpoint(silent, again(6)).checkpoint == "pseudo-00000005"
    assert _with_newest_checkpoint(silent, again(0)) == silent


def _manifest(store: CheckpointStore, name: str) -> Manifest:
    return store.whole(next(head for head in store.committed() if head.name == name))
