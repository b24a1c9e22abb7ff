import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.data.identity import joined_identity, token_identity
from pseudoreal_trainer.data.tokens.arrays import raw_files
from pseudoreal_trainer.data.tokens.megatron import megatron_files
from pseudoreal_trainer.data.tokens.native import native_files

from tests.unit.trainer.data.support.written import write_native
from tests.unit.trainer.data.tokens.support.golden import FIVE, MEGATRON_INDEX

MIB = 1 << 20


def _native(folder: Path, *documents: list[int]) -> CorpusIdentity:
    write_native(folder, *([document] for document in documents), vocabulary=300)
    return token_identity(native_files(folder))


def test_native_files_are_known_by_their_digests(tmp_path: Path) -> None:
    found = _native(tmp_path / "a", [1, 2], [3])
    digests = [hashlib.sha256(bytes.fromhex(each)).hexdigest() for each in ("010002000000", "03000000")]
    expected = hashlib.sha256("".join(f"{digest}\n" for digest in digests).encode()).hexdigest()
    assert found == CorpusIdentity(files=2, size=10, sha256=expected, method="Digests")
    assert _native(tmp_path / "b", [1, 2], [3]) == found
    assert not _native(tmp_path / "c", [1, 2], [4]).is_same_text(found)
    assert not _native(tmp_path / "d", [3], [1, 2]).is_same_text(found)


def _raw(path: Path) -> CorpusIdentity:
    return token_identity(raw_files([path], "uint16"))


@pytest.mark.parametrize("size", [0, 10, MIB, MIB + 6, 3 * MIB])
def test_files_of_others_are_known_by_size_and_ends(tmp_path: Path, size: int) -> None:
    content = (np.arange(size) % 251).astype(np.uint8)
    content.tofile(tmp_path / "a")
    found = _raw(tmp_path / "a")
    assert (found.files, found.size, found.method) == (1, size, "Ends")
    content.tofile(tmp_path / "another-name")
    assert _raw(tmp_path / "another-name") == found
    for place in {0, min(size, MIB) - 1, max(0, size - MIB), size - 1} if size else set():
        changed = content.copy()
        changed[place] ^= 1
        changed.tofile(tmp_path / "b")
        assert not _raw(tmp_path / "b").is_same_text(found), place
    np.append(content, [0, 0]).astype(np.uint8).tofile(tmp_path / "b")
    assert not _raw(tmp_path / "b").is_same_text(found)


def test_all_bytes_of_an_index_count(tmp_path: Path) -> None:
    (tmp_path / "X.bin").write_bytes(FIVE)
    (tmp_path / "X.idx").write_bytes(MEGATRON_INDEX + bytes(2))
    found = token_identity(megatron_files([tmp_path / "X.bin"]))
    (tmp_path / "X.idx").write_bytes(MEGATRON_INDEX + bytes([0, 1]))
    assert token_identity(megatron_files([tmp_path / "X.bin"])).sha256 != found.sha256


def test_sources_are_known_by_name(tmp_path: Path) -> None:
    one, two = _native(tmp_path / "a", [1, 2]), _native(tmp_path / "b", [3])
    found = joined_identity({"web": one, "code": two})
    assert found == joined_identity({"code": two, "web": one})
    assert (found.files, found.size) == (2, one.size + two.size)
    assert not joined_identity({"code": one, "web": two}).is_same_text(found)
    assert CorpusIdentity.model_validate_json(found.to_json()) == found


def test_the_identity_of_text_is_written_as_before() -> None:
    """Compatible in both directions with releases that do not know token files."""
    text = {"files": 3, "size": 10, "sha256": "ab" * 32}
    assert json.loads(CorpusIdentity.model_validate(text).to_json()) == text


def test_another_method_is_another_text() -> None:
    text = CorpusIdentity(files=1, size=10, sha256="ab" * 32)
    assert not text.is_same_text(text.model_copy(update={"method": "Ends"}))
