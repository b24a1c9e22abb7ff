"""Saving during training: full and read-only volumes, superseded executions, and the reported cost of a save."""

import errno
import json
import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.tensor_file import TensorWriter
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.runtime.failures import has_lost_a_peer
from pseudoreal_trainer.training.phase import train_phase
from pseudoreal_trainer.training.saving import SavingFailed

from tests.support.checkpoints import assert_same, newest_of
from tests.support.forked import run_ranks
from tests.support.small_volume import mounted

UID = "11111111-2222"


@pytest.mark.parametrize("mode", ["Async", "Sync"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_volume_that_fails_ends_the_phase_and_keeps_what_was_committed(
    number: int, mode: str, job_body: Any, config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_body["spec"]["checkpoint"] |= {"everySteps": 2, "mode": mode}
    train(config(0, "whole"))
    append, calls = TensorWriter.append, count(1)

    def failing(self: TensorWriter, content: Any) -> None:
        if next(calls) > 12:
            raise OSError(number, os.strerror(number))
        append(self, content)

    with monkeypatch.context() as patch:
        patch.setattr(TensorWriter, "append", failing)
        says = rf"pseudo-0000000\d could not be written: .*{os.strerror(number)}"
        with pytest.raises(SavingFailed, match=says) as raised:
            train(config(0, "broken"))
    assert ("enlarge the volume" in str(raised.value)) == (number == errno.ENOSPC)
    assert newest_of(config(0, "broken")).manifest.step == 2
    train(config(0, "broken"))
    assert_same(newest_of(config(0, "whole")), newest_of(config(0, "broken")))


def _rank(number: int, config: PhaseConfig, folder: Path) -> None:
    def failing(_: TensorWriter, __: Any) -> None:
        raise OSError(errno.EIO, "the disk has failed")

    if number == 1:
        TensorWriter.append = failing  # type: ignore[assignment, method-assign]
    corpus = load_corpus(config.data, config.model.sequence_length)
    try:
        train_phase(config, corpus, Ranks(number, 2, torch.device("cpu")), lambda: False)
    except SavingFailed as error:
        (folder / f"{number}").write_text(f"{has_lost_a_peer(error)}: {error}")
    # Skip the teardown: the other rank's process groups may be gone.
    os._exit(0)


def test_the_rank_whose_files_could_not_be_written_is_at_fault_and_the_other_says_so(
    job_body: Any, config: Any, tmp_path: Path
) -> None:
    job_body["spec"]["checkpoint"] |= {"everySteps": 2, "mode": "Sync"}
    job_body["spec"]["phases"][0]["workers"] = 2
    run_ranks(_rank, 2, config(0), tmp_path)
    said = [(tmp_path / f"{number}").read_text() for number in range(2)]
    assert said[0].startswith("True: checkpoint pseudo-00000002 could not be written: another rank says why")
    assert said[1].startswith("False: checkpoint pseudo-00000002 could not be written: [Errno 5] the disk has failed")


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    with mounted(tmp_path / "volume", "ro") as folder:
        yield folder


def test_a_read_only_volume_is_named_before_the_first_step(config: Any, train: Any, read_only: Path) -> None:
    phase = config(0).model_copy(update={"work_directory": str(read_only / "work")})
    with pytest.raises(TrainingError, match=r"volume/work cannot be written to: .*Read-only file system"):
        train(phase)


def test_the_metrics_say_what_a_checkpoint_cost(job_body: Any, config: Any, train: Any) -> None:
    job_body["spec"]["checkpoint"] |= {"everySteps": 2, "mode": "Sync"}
    train(config(0))
    lines = [json.loads(line) for line in (Path(config(0).work_directory) / "metrics.jsonl").read_text().splitlines()]
    costs = {line["step"]: line["checkpoint"] for line in lines}
    assert [step for step, cost in costs.items() if cost is not None] == [3, 5]
    saved = Path(config(0).work_directory) / "checkpoints" / "pseudo-00000006"
    sizes = sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    for step, cost in ((3, costs[3]), (5, costs[5])):
        assert cost["step"] == step - 1
        assert cost["bytes"] == sizes
        assert cost["bytes_per_second"] == pytest.approx(cost["bytes"] / cost["seconds"])
        assert cost["stall_seconds"] > 0
