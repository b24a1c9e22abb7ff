from pathlib import Path
from typing import Any

import pytest
from pseudoreal_api.model_spec import Data
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.errors import InvalidJobError


def _data(path: Path, **more: Any) -> Data:
    return Data.model_validate({"path": str(path), **more})


def test_files_are_joined_by_name_and_the_end_is_validation(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in (("z.txt", "zzzz"), ("sub/a.txt", "aaaa"), ("b.txt", "bb"), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    corpus = load_corpus(_data(tmp_path, validation={"fraction": "0.3"}), 2)
    assert corpus.train.tobytes() + corpus.validation.tobytes() == b"bbaaaazzzz"
    assert corpus.validation.tobytes() == b"zzz"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"data.path .*nowhere is not a folder"):
        load_corpus(_data(tmp_path / "nowhere"), 2)


@pytest.mark.parametrize("pattern", ["*.none", "/etc/*.txt"])
def test_a_pattern_without_files_is_named(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(InvalidJobError, match=r"data.pattern \S+ (matches no file|is not a glob)"):
        load_corpus(_data(tmp_path, pattern=pattern), 2)


def test_too_little_text_is_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 100)
    with pytest.raises(InvalidJobError, match=r"100 bytes.*leaves 2 for validation.*sequence \+ 1 = 9"):
        load_corpus(_data(tmp_path, validation={"fraction": "0.02"}), 8)
