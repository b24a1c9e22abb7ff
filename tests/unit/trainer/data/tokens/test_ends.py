"""Files are refused if their documents do not end with the token used as the end of a document in training."""

from pathlib import Path

import numpy as np
import pytest
from pseudoreal_trainer.data.tokens import ends
from pseudoreal_trainer.data.tokens.arrays import raw_files
from pseudoreal_trainer.data.tokens.ends import check_ends
from pseudoreal_trainer.data.tokens.megatron import megatron_files
from pseudoreal_trainer.data.tokens.nanotron import nanotron_files
from pseudoreal_trainer.data.tokens.opening import Format
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError

from tests.unit.trainer.data.tokens.support.golden import FIVE, MEGATRON_INDEX


def _megatron(folder: Path, tokens: bytes) -> TokenFiles:
    """Write two documents: tokens 0 to 2, and tokens 3 and 4."""
    (folder / "X.idx").write_bytes(MEGATRON_INDEX)
    (folder / "X.bin").write_bytes(tokens)
    return megatron_files([folder / "X.bin"])


def _nanotron(folder: Path, tokens: bytes, *, indexed: bool = True) -> TokenFiles:
    (folder / "X.ds").write_bytes(tokens)
    (folder / "X.ds.metadata").write_text("gpt2|2\n5\n5 T")
    if indexed:
        (folder / "X.ds.index").write_bytes(bytes.fromhex("0300000000000000 0500000000000000"))
    return nanotron_files([folder / "X.ds"])


@pytest.mark.parametrize(("kind", "write"), [("Megatron", _megatron), ("Nanotron", _nanotron)])
def test_documents_of_a_table_are_looked_at(kind: Format, write: object, tmp_path: Path) -> None:
    assert callable(write)
    with pytest.raises(
        InvalidJobError, match=r"1 of 2 documents of .*X\.\w+ that were looked at .* with the token 5; name"
    ):
        check_ends(kind, write(tmp_path, FIVE), 5)
    check_ends(kind, write(tmp_path, bytes.fromhex("0100 0200 0500 0400 0500")), 5)


def test_files_of_nanotron_without_an_index_are_believed(tmp_path: Path) -> None:
    check_ends("Nanotron", _nanotron(tmp_path, FIVE, indexed=False), 9)


def test_bare_tokens_must_have_the_end_somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files have 100 and 60 tokens. The check reads two tokens at each of the places 0, 10, 20, … of their
    concatenation."""
    monkeypatch.setattr(ends, "_PORTION", 2)
    places = [*range(0, 160, 10), *range(1, 160, 10)]
    for place in range(160):
        tokens = np.full(160, 7, "<u2")
        tokens[place] = 3
        tokens[:100].tofile(tmp_path / "a")
        tokens[100:].tofile(tmp_path / "b")
        files = raw_files([tmp_path / "a", tmp_path / "b"], "uint16")
        if place in places:
            check_ends("Raw", files, 3)
            continue
        with pytest.raises(InvalidJobError, match=r"the token 3, which should end documents, is at none of 16 places"):
            check_ends("Raw", files, 3)


def test_native_files_are_not_looked_at(tmp_path: Path) -> None:
    """Their writer has ended every document with the token."""
    check_ends("Native", raw_files([_file(tmp_path)], "uint16"), 9)


def _file(folder: Path) -> Path:
    (folder / "tokens").write_bytes(FIVE)
    return folder / "tokens"
