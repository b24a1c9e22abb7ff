import hashlib
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pseudoreal_api.spec.data import Data
from pseudoreal_trainer.data import corpus as corpus_room
from pseudoreal_trainer.data.corpus import corpus_files, load_corpus
from pseudoreal_trainer.errors import InvalidJobError, TrainingError


def _data(path: Path, **more: Any) -> Data:
    return Data.model_validate({"path": str(path), **more})


def test_files_are_joined_by_name_and_the_end_is_validation(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("z.txt", "zzzz"), ("sub/a.txt", "aaaa"), ("b.txt", "bb"), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    corpus = load_corpus(_data(tmp_path, validation={"fraction": "0.3"}), 2)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == b"bbaaaazzzz"
    assert corpus.validation.tobytes() == b"zzz"
    assert (corpus.identity.files, corpus.identity.size) == (3, 10)
    assert corpus.identity.sha256 == hashlib.sha256(b"bbaaaazzzz").hexdigest()


def test_one_copy_of_the_text_is_in_memory(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_bytes(bytes(8 << 20))
    tracemalloc.start()
    corpus = load_corpus(_data(tmp_path), 16)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert corpus.bytes == 16 << 20
    assert peak < 17 << 20
    assert np.shares_memory(corpus.train, corpus.text)
    assert np.shares_memory(corpus.validation, corpus.text)


@pytest.mark.parametrize("change", [-1, 1])
def test_a_file_that_is_being_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    (tmp_path / "b.txt").write_text("x" * 100)

    def files(data: Data) -> list[Path]:
        found = corpus_files(data)
        monkeypatch.setattr(np, "empty", writing)
        return found

    def writing(*arguments: Any, **more: Any) -> Any:
        (tmp_path / "b.txt").write_text("x" * (100 + change))
        return np.zeros(*arguments, **more)

    monkeypatch.setattr(corpus_room, "corpus_files", files)
    with pytest.raises(TrainingError, match=r"b.txt of the corpus is being written"):
        load_corpus(_data(tmp_path), 2)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"data.path .*nowhere is not a folder"):
        load_corpus(_data(tmp_path / "nowhere"), 2)


@pytest.mark.parametrize("pattern", ["*.none", "/etc/*.txt"])
def test_a_pattern_without_files_is_named(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(InvalidJobError, match=r"data.pattern \S+ (matches no file|is not a glob)"):
        load_corpus(_data(tmp_path, pattern=pattern), 2)


def test_too_little_text_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(InvalidJobError, match=r"100 bytes.*leaves 2 for validation.*sequenceLength \+ 1 = 9"):
        load_corpus(_data(tmp_path, validation={"fraction": "0.02"}), 8)
