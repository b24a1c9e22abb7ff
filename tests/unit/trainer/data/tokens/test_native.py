import errno
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.tokens import native
from pseudoreal_trainer.data.tokens.native import (
    Index,
    Shard,
    ShardWriter,
    finished_shard,
    native_files,
    read_index,
    token_type,
    verify,
    write_index,
)
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.errors import InvalidJobError

from tests.support.depth import DEPTH

Documents = list[list[int]]


def _write(folder: Path, number: int, documents: Documents, vocabulary: int = 300) -> Shard:
    with ShardWriter(folder, number, vocabulary=vocabulary, end_of_document=vocabulary - 1) as writer:
        for document in documents:
            writer.append(document, 10 * len(document))
        return writer.finish()


def _index(*shards: Shard, vocabulary: int = 300) -> Index:
    return Index(
        version=1,
        dtype=token_type(vocabulary),
        vocabulary=vocabulary,
        end_of_document=vocabulary - 1,
        tokenizer="ab" * 32,
        text_bytes=sum(shard.text_bytes for shard in shards),
        shards=[*shards],
    )


def test_the_bytes_of_a_small_vocabulary(tmp_path: Path) -> None:
    shard = _write(tmp_path, 7, [[1, 2, 3], [4, 258]])
    tokens, lengths = bytes.fromhex("0100020003002b01 040002012b01"), bytes.fromhex("04000000 03000000")
    assert (tmp_path / "00007.bin").read_bytes() == tokens
    assert (tmp_path / "00007.lengths").read_bytes() == lengths
    assert json.loads((tmp_path / "00007.json").read_text()) == {
        "name": "00007",
        "tokens": 7,
        "documents": 2,
        "textBytes": 50,
        "sha256": hashlib.sha256(tokens).hexdigest(),
        "lengthsSha256": hashlib.sha256(lengths).hexdigest(),
    }
    assert sorted(os.listdir(tmp_path)) == ["00007.bin", "00007.json", "00007.lengths"]
    assert finished_shard(tmp_path, 7, "uint16") == shard


def test_the_bytes_of_a_large_vocabulary(tmp_path: Path) -> None:
    _write(tmp_path, 0, [[1, 65_536]], vocabulary=65_538)
    assert (tmp_path / "00000.bin").read_bytes() == bytes.fromhex("01000000 00000100 01000100")


@pytest.mark.parametrize(("vocabulary", "expected"), [(2, "uint16"), (65_536, "uint16"), (65_537, "uint32")])
def test_tokens_are_as_narrow_as_the_vocabulary_allows(vocabulary: int, expected: str) -> None:
    assert token_type(vocabulary) == expected


documents = st.lists(st.lists(st.integers(0, 298), max_size=8), max_size=6)


@settings(max_examples=DEPTH.of(40, 1000))
@given(shards=st.lists(documents, min_size=1, max_size=3))
def test_native_files_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, shards: list[Documents]) -> None:
    folder = tmp_path_factory.mktemp("native")
    index = _index(*(_write(folder, number, each) for number, each in enumerate(shards)))
    write_index(folder, index)
    assert read_index(folder) == index
    for shard, written in zip(index.shards, shards, strict=True):
        verify(folder, index, shard)
        lengths = np.fromfile(folder / f"{shard.name}.lengths", "<u4").tolist()
        assert lengths == [len(document) + 1 for document in written]
    flat = [token for each in shards for document in each for token in [*document, 299]]
    reader = TokenReader(native_files(folder), 300)
    assert reader.tokens == len(flat)
    assert reader.windows(np.zeros(1, np.int64), len(flat))[0].tolist() == flat


def test_left_by_an_error_it_is_not_there(tmp_path: Path) -> None:
    def interrupted() -> None:
        with ShardWriter(tmp_path, 0, vocabulary=300, end_of_document=299) as writer:
            writer.append([1], 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("renames", range(4))
def test_killed_at_any_moment_it_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """The process dies before its first rename, before the second, …, and after the last; then the write is
    repeated."""
    rename = Path.rename
    left = [None] * renames

    def die(path: Path, target: Path) -> Path:
        if not left:
            raise OSError(errno.EIO, "killed")
        left.pop()
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", die)
    monkeypatch.setattr(ShardWriter, "__exit__", lambda *_: None)
    try:
        _write(tmp_path, 0, [[1, 2], [3]])
    except OSError:
        assert finished_shard(tmp_path, 0, "uint16") is None
    else:
        assert renames == 3
    monkeypatch.undo()
    again = finished_shard(tmp_path, 0, "uint16") or _write(tmp_path, 0, [[1, 2], [3]])
    verify(tmp_path, _index(again), again)
    assert again.tokens == 5


def test_a_shard_that_is_written_again_is_not_there_meanwhile(tmp_path: Path) -> None:
    _write(tmp_path, 0, [[1]])
    with ShardWriter(tmp_path, 0, vocabulary=300, end_of_document=299):
        assert finished_shard(tmp_path, 0, "uint16") is None


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1, 300], r"document 1 of shard 00000 has the token 300, which is outside of 0..299"),
        ([-1], r"document 1 of shard 00000 has the token -1, which is outside"),
        ([5, 299, 6], r"document 1 .* has the token 299 inside, which ends documents; encode special strings"),
        ([1] * 7, r"document 1 .* would make the shard larger than 20 bytes: begin another one"),
    ],
)
def test_a_wrong_document_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: list[int], message: str
) -> None:
    monkeypatch.setattr(native, "MOST_SHARD_BYTES", 20)
    with ShardWriter(tmp_path, 0, vocabulary=300, end_of_document=299) as writer:
        writer.append([1, 2], 2)
        assert writer.has_room_for(6)
        assert not writer.has_room_for(7)
        with pytest.raises(ValueError, match=message):
            writer.append(document, 1)
        assert writer.finish().tokens == 3


def _changed(**fields: Any) -> Callable[[Any], Any]:
    return lambda body: body | fields


def _shard(**fields: Any) -> Callable[[Any], Any]:
    return lambda body: body | {"shards": [body["shards"][0] | fields]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_changed(version=2), r"at version: Input should be 1, found '2'.*a trainer that knows their version"),
        (_changed(version=2, checksums=[], dtype="uint8"), r"at version"),
        (_changed(dtype="uint32"), r"a vocabulary of 300 has the dtype uint16"),
        (_changed(dtype="float32"), r"at dtype: Input should be 'uint16' or 'uint32', found 'float32'"),
        (_changed(endOfDocument=300), r"endOfDocument 300 is not below the vocabulary 300"),
        (_changed(vocabulary=0), r"at vocabulary"),
        (_changed(tokenizer="abc"), r"at tokenizer"),
        (_changed(textBytes=7), r"textBytes is 7, and the shards have 30"),
        (_changed(extra=1), r"at extra: Extra inputs are not permitted"),
        (_shard(name="../0"), r"at shards.0.name"),
        (_shard(tokens=-1), r"at shards.0.tokens"),
        (_shard(sha256="AB" * 32), r"at shards.0.sha256"),
        (lambda body: body | {"shards": body["shards"] * 2}, r"two shards have the same name"),
        (lambda body: {key: value for key, value in body.items() if key != "version"}, r"at version: Field required"),
        (lambda _: [], r"at the whole: Input should be an object"),
    ],
)
def test_a_damaged_index_is_refused_by_name(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    write_index(tmp_path, _index(_write(tmp_path, 0, [[1, 2, 3]])))
    path = tmp_path / "index.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(InvalidJobError, match=f"^{path} cannot be used: .*{message}"):
        read_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b'{"version": 1', b"\xff\xfe\x00"])
def test_an_index_that_is_no_json_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "index.json").write_bytes(content)
    with pytest.raises(InvalidJobError, match=r"index.json cannot be used: at the whole: Invalid JSON"):
        read_index(tmp_path)


def test_a_folder_without_an_index_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"index.json is not there: .*`pseudoreal data prepare` has not ended"):
        read_index(tmp_path)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("ending", [".bin", ".lengths"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, r" has the SHA-256 [0-9a-f]{16}…, and index.json says [0-9a-f]{16}….*prepare this shard again"),
        (_cut, r" has \d+ bytes, and by index.json it has \d+.*restore it or make it again"),
        (Path.unlink, r" is missing, which belongs to .*index.json; restore it"),
    ],
)
def test_a_damaged_shard_is_refused_by_name(
    tmp_path: Path, ending: str, damage: Callable[[Path], None], message: str
) -> None:
    shard = _write(tmp_path, 0, [[1, 2, 3]])
    verify(tmp_path, _index(shard), shard)
    damage(tmp_path / f"00000{ending}")
    with pytest.raises(InvalidJobError, match=f"00000{ending}{message}"):
        verify(tmp_path, _index(shard), shard)


def test_a_finished_shard_that_was_cut_since_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, 0, [[1, 2, 3]])
    _cut(tmp_path / "00000.bin")
    with pytest.raises(InvalidJobError, match=r"00000.bin has 7 bytes, and by 00000.json it has 8"):
        finished_shard(tmp_path, 0, "uint16")
