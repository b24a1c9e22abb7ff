from pathlib import Path
from typing import get_args

import pytest
from pseudoreal_trainer.data.tokens.opening import Format, token_files
from pseudoreal_trainer.errors import InvalidJobError

from tests.unit.trainer.data.support.written import write_native
from tests.unit.trainer.data.tokens.support.golden import FIVE, MEGATRON_INDEX, NUMPY_HEADER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the same tokens in every format, in subfolders."""
    for name in ("m", "n", "p", "r"):
        (tmp_path / name).mkdir()
    (tmp_path / "m" / "X.bin").write_bytes(FIVE)
    (tmp_path / "m" / "X.idx").write_bytes(MEGATRON_INDEX)
    (tmp_path / "n" / "X.ds").write_bytes(FIVE)
    (tmp_path / "n" / "X.ds.metadata").write_text("gpt2|2\n5\n5 T")
    (tmp_path / "p" / "X.npy").write_bytes(NUMPY_HEADER + FIVE)
    (tmp_path / "r" / "X.npy").write_bytes(FIVE)
    write_native(tmp_path, [[1, 2, 3, 4]], vocabulary=300, end=5)
    return tmp_path


PATTERNS: dict[Format, str] = {
    "Native": "",
    "Megatron": "m/*.bin",
    "Nanotron": "**/*.ds",
    "NumPy": "p/X.npy",
    "Raw": "r/*",
}


@pytest.mark.parametrize("kind", get_args(Format))
def test_every_format_is_opened(folder: Path, kind: Format) -> None:
    files = token_files(kind, folder, PATTERNS[kind])
    assert files.tokens == 5
    assert files.end_of_document == (5 if kind == "Native" else None)


def test_the_dtype_of_raw_files_is_what_the_user_says(folder: Path) -> None:
    assert token_files("Raw", folder, "r/*", "uint8").tokens == 10


def test_nothing_that_matches_is_named(folder: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"'x/\*\.bin' matches no file below .*; change the pattern"):
        token_files("Megatron", folder, "x/*.bin")
    with pytest.raises(InvalidJobError, match=r"'/etc/\*' is not a glob pattern below"):
        token_files("Megatron", folder, "/etc/*")
