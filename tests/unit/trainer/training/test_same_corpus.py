"""A corpus that changes between two attempts, or that is another one for some rank, is refused."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.training.progress import Progress
from pseudoreal_trainer.training.same_corpus import agree_on_corpus

from tests.unit.trainer.forked import run_ranks

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
        train(config(0, attempt=2))


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
    assert train(config(0, attempt=2)).outcome == "Succeeded"


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
    assert {manifest.corpus.files for manifest in saved if manifest.corpus} == {3}


def _as_of_version_2(folder: Path) -> None:
    """Rewrites the manifest in `folder` as a release before 0.3 writes it."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["corpus"]
    path.write_text(json.dumps(manifest | {"formatVersion": 2}))


def test_training_that_an_earlier_release_began_goes_on_in_its_order(
    config: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a training that makes all steps in numpy's order."""
    with monkeypatch.context() as old:
        old.setattr("pseudoreal_trainer.training.start.Progress", partial(Progress, generator="numpy PCG64"))
        train(config(0, "parts"), _stop_after(3))
        train(config(0, "whole"))
    _as_of_version_2(tmp_path / "parts" / "checkpoints" / "pseudo-00000003")
    train(config(0, "parts", attempt=2))
    parts, whole = (CheckpointStore(tmp_path / work, "11111111-2222").newest("pseudo") for work in ("parts", "whole"))
    assert parts is not None
    assert whole is not None
    assert (parts.manifest.format_version, parts.manifest.random.generator) == (3, "numpy PCG64")
    assert parts.manifest.corpus == whole.manifest.corpus is not None
    for kind in KINDS:
        assert all(np.array_equal(parts.tensor(name, kind), whole.tensor(name, kind)) for name in whole.names)


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
