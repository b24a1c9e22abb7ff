"""Rank 0 chooses the checkpoint. A rank whose volume does not show the checkpoint yet waits; it never takes another
one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint import visible
from pseudoreal_trainer.checkpoint.origin import Anew, Resumed, find_origin
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.storage.files import FileStorage

from tests.support.forked import run_ranks

CPU = torch.device("cpu")
LOOKS = 3
"""Number of failing looks at each file before the file appears."""


def _stale(*, forever: bool) -> None:
    """Give this process a stale view of its volume: files are missing or have old content, and listing is forbidden."""
    looked: dict[Path, int] = {}

    def behind(path: Path) -> bool:
        looked[path] = looked.get(path, 0) + 1
        return forever or looked[path] <= LOOKS

    def read(self: FileStorage) -> bytes:
        return b"{}" if behind(self.path) else self.path.read_bytes()

    def size(self: FileStorage) -> int:
        if behind(self.path):
            raise FileNotFoundError(2, "not yet", str(self.path))
        return self.path.stat().st_size

    def find(self: FileStorage, name: str) -> Sequence[Path]:
        raise AssertionError(f"a rank other than the first lists {self.path} for {name}")

    FileStorage.read, FileStorage.size, FileStorage.find = read, size, find  # type: ignore[method-assign]


def _starts(rank: int, config_file: str, folder: str, forever: bool) -> None:
    visible._AGAIN_SECONDS, visible._MOST_SECONDS = 0.001, 1.0 if forever else 120.0
    if rank == 1:
        _stale(forever=forever)
    config = PhaseConfig.model_validate_json(Path(config_file).read_bytes())
    try:
        origin = find_origin(config, store_of(config), Ranks(rank, 2, CPU))
        said = "none" if isinstance(origin, Anew) else origin.checkpoint.manifest.to_json()
    except TrainingError as error:
        said = str(error)
    (Path(folder) / str(rank)).write_text(said)


@pytest.fixture
def saved(config: Any, train: Callable[..., Any], tmp_path: Path) -> str:
    train(config(0))
    file = tmp_path / "config.json"
    file.write_text(config(0, execution=2).to_json())
    return str(file)


def test_a_rank_waits_until_it_sees_what_the_first_one_chose(saved: str, tmp_path: Path) -> None:
    run_ranks(_starts, 2, saved, str(tmp_path), False)
    first, second = ((tmp_path / str(rank)).read_text() for rank in (0, 1))
    assert json.loads(first)["step"] == 6
    assert first == second


def test_a_rank_that_never_sees_the_checkpoint_fails_with_a_sentence(saved: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"terminated|exited"):
        run_ranks(_starts, 2, saved, str(tmp_path), True)
    said = (tmp_path / "1").read_text()
    assert said.startswith("this rank does not see ")
    assert "work/checkpoints/pseudo-00000006/manifest.json as rank 0 does" in said


def test_a_file_that_is_gone_for_the_first_rank_too_is_not_waited_for(
    saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(visible, "_MOST_SECONDS", 0.0)
    (tmp_path / "work" / "checkpoints" / "pseudo-00000006" / "weights-00000.safetensors").unlink()
    config = PhaseConfig.model_validate_json(Path(saved).read_bytes())
    origin = find_origin(config, store_of(config), Ranks(0, 1, CPU))
    assert isinstance(origin, Resumed)
    assert origin.checkpoint.manifest.step == 5
