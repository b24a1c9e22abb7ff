"""A job that continues from another job's checkpoints ends with the same weights as an uninterrupted job."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.resolved.config import DiscardConfig, PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

OLD, NEW = "tiny-11111111", "tiny-22222222"
THIRD_UID = "33333333-4444"


Configs = Callable[..., PhaseConfig]


@pytest.fixture
def continuing(job_body: dict[str, Any], config: Configs) -> Configs:
    def make(index: int, **changes: Any) -> PhaseConfig:
        job_body["spec"]["checkpoint"]["continueFrom"] = OLD
        job_body["metadata"]["uid"] = "22222222-3333"
        return config(index, NEW).model_copy(update=changes)

    return make


def _stop_after(steps: int) -> Callable[[], bool]:
    made = iter(range(100))
    return lambda: next(made) >= steps - 1


def _weights(folder: Path, uid: str) -> dict[str, Any]:
    newest = CheckpointStore(folder, uid).newest("real", complete=True)
    assert newest is not None
    return newest.whole()


def _steps(folder: Path, phase: str) -> list[int]:
    return [m.step for m in CheckpointStore(folder, "22222222-3333").committed(phase)]


@pytest.fixture
def undisturbed(train_job: Callable[[str], Any], tmp_path: Path) -> dict[str, Any]:
    train_job("whole")
    return _weights(tmp_path / "whole", "11111111-2222")


@pytest.mark.parametrize(("steps_of_real", "saved"), [(2, [6, 8, 10, 12]), (5, [6, 11, 12])])
def test_job_continues_in_the_phase_where_the_other_job_ended(
    steps_of_real: int,
    saved: list[int],
    undisturbed: Any,
    config: Any,
    delink_of: Any,
    train: Any,
    continuing: Any,
    tmp_path: Path,
) -> None:
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    assert train(config(1, OLD), _stop_after(steps_of_real)).outcome == "Yielded"
    before = sorted(path.name for path in (tmp_path / OLD / "checkpoints").iterdir())

    pseudo = train(continuing(0))
    assert (pseudo.outcome, pseudo.step, pseudo.checkpoint) == ("Succeeded", 6, "pseudo-00000006")
    assert _steps(tmp_path / NEW, "pseudo") == [6], "nothing is trained again"
    delink(delink_of(1, NEW))
    real = train(continuing(1))
    assert (real.outcome, real.step) == ("Succeeded", 12)
    assert _steps(tmp_path / NEW, "real") == saved
    found = _weights(tmp_path / NEW, "22222222-3333")
    assert all(np.array_equal(undisturbed[name], found[name]) for name in undisturbed)
    assert sorted(path.name for path in (tmp_path / OLD / "checkpoints").iterdir()) == before
    # Once it has checkpoints of its own it needs the other job's no more.
    assert train(continuing(1, continues=str(tmp_path / "gone"))).outcome == "Succeeded"


def test_job_continues_within_the_first_phase(
    undisturbed: Any, config: Any, delink_of: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    train(config(0, OLD), _stop_after(3))
    train(continuing(0))
    delink(delink_of(1, NEW))
    train(continuing(1))
    found = _weights(tmp_path / NEW, "22222222-3333")
    assert all(np.array_equal(undisturbed[name], found[name]) for name in undisturbed)


def test_a_job_that_is_given_up_at_once_has_what_it_took_over(
    config: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    train(config(0, OLD), _stop_after(3))

    def fails() -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        train(continuing(0), fails)
    assert _steps(tmp_path / NEW, "pseudo") == [3]


def test_checkpoints_of_the_other_job_from_another_phase_start_do_not_count(
    config: Any, delink_of: Any, train: Any, continuing: Any, job_body: Any, tmp_path: Path, capsys: Any
) -> None:
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    train(config(1, OLD), _stop_after(5))
    job_body["spec"]["phases"][0]["until"]["step"] = 8
    assert train(continuing(0)).step == 8
    delink(delink_of(1, NEW))
    train(continuing(1))
    assert _steps(tmp_path / NEW, "real") == [8, 10, 12]
    assert "continued_phase_began_elsewhere" in capsys.readouterr().out


def test_a_last_phase_that_ended_early_may_train_on(
    config: Any, delink_of: Any, train: Any, continuing: Any, job_body: Any
) -> None:
    job_body["spec"]["phases"][1]["until"]["validationLoss"] = "100"
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    assert train(config(1, OLD)).step == 6
    train(continuing(0))
    delink(delink_of(1, NEW))
    del job_body["spec"]["phases"][1]["until"]["validationLoss"]
    assert train(continuing(1)).step == 12


def test_job_may_train_longer_than_the_job_that_it_continues(
    config: Any, train: Any, continuing: Any, job_body: Any
) -> None:
    assert train(config(0, OLD)).step == 6
    job_body["spec"]["phases"][0]["until"]["step"] = 9
    assert train(continuing(0)).step == 9


def test_a_phase_that_is_trained_again_forgets_what_the_other_made_of_it(
    config: Any, train: Any, continuing: Any
) -> None:
    train(config(0, OLD))
    again = continuing(0, discards={"pseudo": [DiscardConfig(before_execution=2, from_step=5)]}, execution=2)
    made = iter(range(100))
    assert train(again, lambda: next(made) < 0).step == 6
    assert next(made) == 6, "from the start: the checkpoints of steps 5 and 6 count no more"


def test_checkpoints_of_the_continued_job_in_a_later_phase_survive_a_roll_back(
    config: Any, delink_of: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    """The roll back repeats only the end of the earlier phase, with the same result."""
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    train(config(1, OLD), _stop_after(5))
    train(continuing(0))
    rule = DiscardConfig(before_execution=2, from_step=0, continued=False)
    after = {"execution": 2, "discards": {"real": [rule]}}
    delink(delink_of(1, NEW).model_copy(update=after))
    train(continuing(1, **after))
    assert _steps(tmp_path / NEW, "real") == [6, 11, 12]


def test_a_job_that_continues_a_continuing_one_finds_what_the_first_made(
    undisturbed: Any, config: Any, delink_of: Any, train: Any, continuing: Any, job_body: Any, tmp_path: Path
) -> None:
    """The second job was given up before its first step of the phase."""
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    train(config(1, OLD), _stop_after(5))
    train(continuing(0))
    delink(delink_of(1, NEW))
    job_body["metadata"]["uid"] = THIRD_UID
    job_body["spec"]["checkpoint"]["continueFrom"] = NEW
    train(config(0, "tiny-33333333"))
    delink(delink_of(1, "tiny-33333333"))
    train(config(1, "tiny-33333333"))
    store = CheckpointStore(tmp_path / "tiny-33333333", THIRD_UID)
    assert [m.step for m in store.committed("real")] == [6, 11, 12]
    found = _weights(tmp_path / "tiny-33333333", THIRD_UID)
    assert all(np.array_equal(undisturbed[name], found[name]) for name in undisturbed)


def test_checkpoints_discarded_by_the_second_job_stay_discarded_for_the_third(
    config: Any, delink_of: Any, train: Any, continuing: Any, job_body: Any, tmp_path: Path
) -> None:
    train(config(0, OLD))
    delink(delink_of(1, OLD))
    train(config(1, OLD), _stop_after(5))
    train(continuing(0))
    delink(delink_of(1, NEW))
    rule = DiscardConfig(before_execution=2, from_step=7)
    train(continuing(1, execution=2, discards={"real": [rule]}), _stop_after(2))
    assert _steps(tmp_path / NEW, "real") == [6, 8]
    job_body["metadata"]["uid"] = THIRD_UID
    job_body["spec"]["checkpoint"]["continueFrom"] = NEW
    train(config(0, "tiny-33333333"))
    delink(delink_of(1, "tiny-33333333"))
    train(config(1, "tiny-33333333"), _stop_after(2))
    store = CheckpointStore(tmp_path / "tiny-33333333", THIRD_UID)
    assert [m.step for m in store.committed("real")] == [6, 8, 10], "not from step 11 of the first"


def test_own_checkpoints_discarded_by_a_job_do_not_count_for_the_next_job(
    config: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    """The first job was given up before its first save removed the discarded checkpoint."""
    train(config(0, OLD))
    rule = DiscardConfig(before_execution=2, from_step=5)

    def fails() -> bool:
        raise MemoryError

    with pytest.raises(MemoryError):
        train(config(0, OLD, execution=2).model_copy(update={"discards": {"pseudo": [rule]}}), fails)
    assert (tmp_path / OLD / "checkpoints" / "pseudo-00000006").exists()
    made = iter(range(100))
    train(continuing(0), lambda: next(made) < 0)
    assert next(made) == 6, "from the start"


def test_jobs_that_continue_each_other_are_no_circle_without_end(
    config: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    train(config(0, OLD), _stop_after(3))
    train(continuing(0), _stop_after(1))
    (tmp_path / OLD / "lineage.json").write_text(json.dumps({"continues": NEW}))
    assert train(continuing(0)).step == 6


def test_a_folder_without_the_phase_is_refused(train: Any, continuing: Any) -> None:
    with pytest.raises(InvalidJobError, match=f"continueFrom: .*{OLD}/checkpoints holds no checkpoint of phase pseudo"):
        train(continuing(0))


def test_checkpoints_of_the_other_that_are_all_corrupt_are_named(
    config: Any, train: Any, continuing: Any, tmp_path: Path
) -> None:
    train(config(0, OLD))
    for file in (tmp_path / OLD).glob("checkpoints/*/weights-*"):
        file.write_bytes(b"")
    with pytest.raises(TrainingError, match=f"{OLD}/checkpoints is corrupt: pseudo-00000006"):
        train(continuing(0))


def test_another_model_is_refused(config: Any, train: Any, continuing: Any, job_body: Any) -> None:
    train(config(0, OLD))
    job_body["spec"]["model"]["feedForward"]["size"] = 64
    with pytest.raises(InvalidJobError, match=r"spec\.model is .*64.*make them the same"):
        train(continuing(0))


def test_other_sharing_is_refused(config: Any, train: Any, continuing: Any, job_body: Any) -> None:
    train(config(0, OLD))
    job_body["spec"]["phases"][0]["sharing"]["blocks"] = 2
    with pytest.raises(InvalidJobError, match=r"spec\.phases\[pseudo\]\.sharing"):
        train(continuing(0))


def test_in_one_s_own_folder_checkpoints_of_another_job_are_refused(config: Any, train: Any, job_body: Any) -> None:
    train(config(0, OLD))
    job_body["metadata"]["uid"] = "33333333-4444"
    with pytest.raises(TrainingError, match="belongs to job tiny"):
        train(config(0, OLD))


def test_the_folder_lies_beside_the_job_s_own(job_body: dict[str, Any]) -> None:
    job_body["spec"]["checkpoint"]["continueFrom"] = OLD
    mounted = _config(job_body, "/checkpoints/tiny-22222222")
    assert mounted.continues == f"/checkpoints/{OLD}"
    storage = {"type": "ObjectStorage", "objectStorage": {"url": "s3://bucket/runs"}}
    job_body["spec"]["checkpoint"]["storage"] = storage
    assert _config(job_body, "/scratch/tiny-22222222").continues == f"s3://bucket/runs/{OLD}"
    del job_body["spec"]["checkpoint"]["continueFrom"]
    assert _config(job_body, "/scratch/tiny-22222222").continues is None


def _config(body: dict[str, Any], work_directory: str) -> PhaseConfig:
    job = PseudoRealJob.from_object(body)
    return phase_config(job, 0, execution=1, work_directory=work_directory, offload_directory="/offload")
