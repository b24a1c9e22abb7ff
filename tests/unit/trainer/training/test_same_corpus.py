"""A corpus that changed between two executions, or that differs between ranks, is rejected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.training.start import agree_on_corpus

from tests.support.forked import run_ranks

CPU = torch.device("cpu")


def _stop_after(steps: int) -> Callable[[], bool]:
    made = iter(range(100))
    return lambda: next(made) >= steps - 1


def _add(folder: Path) -> None:
    (folder / "c.txt").write_text("and the house")


def _lengthen(folder: Path) -> None:
    with (folder / "b.txt").open("a") as file:
        file.write(".")


def _rewrite(folder: Path) -> None:
    text = (folder / "a.txt").read_bytes()
    (folder / "a.txt").write_bytes(text.swapcase())


def _swap(folder: Path) -> None:
    (folder / "a.txt").rename(folder / "z.txt")


@pytest.mark.parametrize("change", [_add, _lengthen, _rewrite, _swap])
def test_another_corpus_is_refused_when_a_phase_resumes(
    change: Callable[[Path], None], config: Any, train: Any, corpus_folder: Path
) -> None:
    train(config(0), _stop_after(2))
    change(corpus_folder)
    with pytest.raises(InvalidJobError, match=r"not the one that checkpoint pseudo-00000002 was .* restore the files"):
        train(config(0, execution=2))


def test_another_corpus_is_refused_in_the_next_phase(
    config: Any, delink_of: Any, train: Any, corpus_folder: Path
) -> None:
    train(config(0))
    delink(delink_of(1))
    _add(corpus_folder)
    with pytest.raises(InvalidJobError, match="not the one that checkpoint real-00000006 was trained on"):
        train(config(1))


def test_the_same_text_under_other_names_is_the_same_corpus(config: Any, train: Any, corpus_folder: Path) -> None:
    train(config(0), _stop_after(2))
    text = b"".join((corpus_folder / name).read_bytes() for name in ("a.txt", "b.txt"))
    for name in ("a.txt", "b.txt"):
        (corpus_folder / name).unlink()
    (corpus_folder / "all.txt").write_bytes(text)
    assert train(config(0, execution=2)).outcome == "Succeeded"


def test_a_job_that_continues_another_may_have_another_corpus(
    config: Any, train: Any, corpus_folder: Path, job_body: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    train(config(0, "tiny-11111111"), _stop_after(3))
    _add(corpus_folder)
    job_body["spec"]["checkpoint"]["continueFrom"] = "tiny-11111111"
    job_body["metadata"]["uid"] = "22222222-3333"
    assert train(config(0, "tiny-22222222")).step == 6
    assert "continues_with_another_corpus" in capsys.readouterr().out
    saved = CheckpointStore(tmp_path / "tiny-22222222", "22222222-3333").committed("pseudo")
    assert {manifest.corpus.files for manifest in saved} == {3}


def _disagree(rank: int, folder: str) -> None:
    identity = CorpusIdentity(files=1, size=5, sha256=f"{7 if rank == 1 else 4:064x}")
    try:
        agree_on_corpus(identity, Ranks(rank, 3, CPU))
    except TrainingError as error:
        (Path(folder) / str(rank)).write_text(f"{error.suspect} {error}")


def test_every_rank_says_which_one_reads_another_corpus(tmp_path: Path) -> None:
    run_ranks(_disagree, 3, str(tmp_path))
    for rank, suspect in enumerate(("1", "None", "1")):
        said = (tmp_path / str(rank)).read_text()
        assert said.startswith(
            f"{suspect} rank 1 reads another corpus than rank 0 (rank {rank} reads 5 bytes in 1 file"
        )
