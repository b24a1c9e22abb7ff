"""A machine without a compiler is refused at the start with a sentence, and not in the first step with a traceback."""

import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import Compile
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.training import start
from pseudoreal_trainer.training.phase import train_phase


@pytest.fixture(autouse=True)
def _headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Create Python's headers in the test's folder, and an empty PATH."""
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    paths = SimpleNamespace(get_path=lambda _: str(tmp_path / "include"))
    monkeypatch.setattr(start, "sysconfig", paths)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CC", raising=False)


def _install(folder: Path, name: str) -> None:
    program = folder / "bin" / name
    program.touch()
    os.chmod(program, stat.S_IRWXU)


@pytest.mark.parametrize("name", ["gcc", "clang"])
def test_a_machine_that_can_compile_is_taken(name: str, tmp_path: Path) -> None:
    _install(tmp_path, name)
    start.require_compiler()


def test_without_a_compiler_the_sentence_says_what_to_do() -> None:
    with pytest.raises(
        InvalidJobError,
        match=r"^compile\.mode Blocks needs a C compiler, .* neither gcc nor clang; .* -compiler .*compile\.mode None",
    ):
        start.require_compiler()


def test_a_compiler_of_ones_own_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path, "gcc")
    monkeypatch.setenv("CC", "icx")
    with pytest.raises(InvalidJobError, match="CC names icx, which is not there"):
        start.require_compiler()


def test_without_headers_the_sentence_names_the_file(tmp_path: Path) -> None:
    _install(tmp_path, "gcc")
    (tmp_path / "include" / "Python.h").unlink()
    with pytest.raises(InvalidJobError, match=r"needs Python's headers, but .*Python\.h is not there"):
        start.require_compiler()


def test_a_phase_is_refused_before_its_volume_is_touched(config: Callable[..., PhaseConfig]) -> None:
    """The phase is on a GPU; on a CPU, `compile` is ignored."""
    wanted: Any = config().model_copy(update={"compile": Compile(mode="Blocks")})
    ranks = Ranks(0, 1, torch.device("cuda", 0))
    with pytest.raises(InvalidJobError, match="needs a C compiler"):
        train_phase(wanted, load_corpus(wanted.data, wanted.model.sequence_length), ranks, lambda: False)
    assert not Path(wanted.work_directory).exists()
