"""Formats of other programs: golden bytes, written by hand from their descriptions, and writers made for the tests."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.tokens import megatron
from pseudoreal_trainer.data.tokens.arrays import numpy_files, raw_files
from pseudoreal_trainer.data.tokens.megatron import documents_without_end, megatron_files, read_index, verify
from pseudoreal_trainer.data.tokens.nanotron import nanotron_files
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath

from tests.support.depth import DEPTH
from tests.unit.trainer.data.tokens.support.golden import FIVE, MEGATRON_INDEX, NUMPY_HEADER

Documents = list[list[int]]


def _read(files: TokenFiles, width: int = 5) -> list[int]:
    tokens: list[int] = TokenReader(files, 2**31).windows(np.zeros(1, np.int64), width)[0].tolist()
    return tokens


def _golden_megatron(folder: Path) -> list[StoragePath]:
    (folder / "X.idx").write_bytes(MEGATRON_INDEX)
    (folder / "X.bin").write_bytes(FIVE)
    return [folder / "X.bin"]


def _golden_nanotron(folder: Path) -> list[StoragePath]:
    (folder / "X.ds").write_bytes(FIVE)
    (folder / "X.ds.metadata").write_text("gpt2|2\n5\n5 T")
    (folder / "X.ds.index").write_bytes(bytes.fromhex("0300000000000000 0500000000000000"))
    return [folder / "X.ds"]


def _golden_numpy(folder: Path) -> list[StoragePath]:
    (folder / "X.npy").write_bytes(NUMPY_HEADER + FIVE)
    return [folder / "X.npy"]


def _golden_raw(folder: Path) -> list[StoragePath]:
    """Write Dolma's raw file, whose suffix is misleading."""
    (folder / "X.npy").write_bytes(FIVE)
    return [folder / "X.npy"]


def _raw(files: list[StoragePath]) -> TokenFiles:
    return raw_files(files, "uint16")


GOLDEN = {
    megatron_files: _golden_megatron,
    nanotron_files: _golden_nanotron,
    numpy_files: _golden_numpy,
    _raw: _golden_raw,
}
Open = Callable[[list[StoragePath]], TokenFiles]


@pytest.mark.parametrize("opened", GOLDEN)
def test_golden_bytes(tmp_path: Path, opened: Open) -> None:
    assert len(MEGATRON_INDEX) == 82
    found = opened(GOLDEN[opened](tmp_path))
    assert found.tokens == 5
    assert _read(found) == [1, 2, 3, 4, 5]


def test_golden_header_is_numpys_own(tmp_path: Path) -> None:
    """Otherwise the golden file would not test numpy's format."""
    np.save(tmp_path / "numpys.npy", np.array([1, 2, 3, 4, 5], "<u2"))
    assert (tmp_path / "numpys.npy").read_bytes() == NUMPY_HEADER + FIVE


def _write_megatron(folder: Path, name: str, documents: list[Documents], kind: int, letter: str) -> StoragePath:
    """Write documents of sequences according to the description of the format."""
    sequences = [sequence for document in documents for sequence in document]
    width = struct.calcsize(letter)
    pointers = [width * sum(map(len, sequences[:number])) for number in range(len(sequences))]
    first = [sum(map(len, documents[:number])) for number in range(len(documents) + 1)]
    content = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, kind, len(sequences), len(first))
    content += struct.pack(f"<{len(sequences)}i", *map(len, sequences))
    content += struct.pack(f"<{len(sequences)}q", *pointers) + struct.pack(f"<{len(first)}q", *first)
    (folder / f"{name}.idx").write_bytes(content)
    flat = [token for sequence in sequences for token in sequence]
    (folder / f"{name}.bin").write_bytes(struct.pack(f"<{len(flat)}{letter}", *flat))
    return folder / f"{name}.bin"


small = st.lists(st.integers(0, 127), min_size=1, max_size=9)
megatron_documents = st.lists(st.lists(small, min_size=1, max_size=3), min_size=1, max_size=5)


def _named(value: object) -> str | None:
    """Return names for tests, without the bytes of whole files."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else None


MEGATRON_TYPES = [(1, "B"), (2, "b"), (3, "h"), (4, "i"), (5, "q"), (8, "H")]


@settings(max_examples=DEPTH.of(40, 1000))
@given(st.lists(megatron_documents, min_size=1, max_size=3), st.sampled_from(MEGATRON_TYPES), st.integers(1, 4))
def test_megatron_documents_are_read(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[Documents]], kind: tuple[int, str], portion: int
) -> None:
    folder = tmp_path_factory.mktemp("megatron")
    paths = [_write_megatron(folder, str(number), each, *kind) for number, each in enumerate(files)]
    flat = [token for each in files for document in each for sequence in document for token in sequence]
    assert _read(megatron_files(paths), len(flat)) == flat
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_PORTION", portion)
        for path, documents in zip(paths, files, strict=True):
            index = read_index(megatron.index_path(path))
            verify(index)
            lasts = [[token for sequence in document for token in sequence][-1] for document in documents]
            assert documents_without_end(index, path, 5, 99) == sum(last != 5 for last in lasts)


@settings(max_examples=DEPTH.of(25, 1000))
@given(st.lists(small, min_size=1, max_size=5), st.sampled_from([(2, "H"), (4, "I")]), st.booleans())
def test_nanotron_documents_are_read(
    tmp_path_factory: pytest.TempPathFactory, documents: Documents, kind: tuple[int, str], indexed: bool
) -> None:
    folder, flat = tmp_path_factory.mktemp("nanotron"), [token for document in documents for token in document]
    (folder / "a.ds").write_bytes(struct.pack(f"<{len(flat)}{kind[1]}", *flat))
    (folder / "a.ds.metadata").write_text(f"org/name|of|it|{kind[0]}\n{len(flat)}\n0.01 kT")
    ends = [sum(map(len, documents[: number + 1])) for number in range(len(documents))]
    if indexed:
        (folder / "a.ds.index").write_bytes(struct.pack(f"<{len(ends)}Q", *ends))
    files = nanotron_files([folder / "a.ds"])
    assert _read(files, len(flat)) == flat
    assert len(files.indices) == 1 + indexed


@settings(max_examples=DEPTH.of(25, 1000))
@given(st.lists(st.integers(0, 127), min_size=1), st.sampled_from(["<u2", ">u2", "<u4", "<i4", "<i8", "|u1", ">i8"]))
def test_numpy_files_of_every_integer_are_read(
    tmp_path_factory: pytest.TempPathFactory, tokens: list[int], kind: str
) -> None:
    folder = tmp_path_factory.mktemp("numpy")
    np.save(folder / "a.npy", np.array(tokens, kind))
    assert _read(numpy_files([folder / "a.npy"]), len(tokens)) == tokens


def test_megatron_files_with_modes_are_read(tmp_path: Path) -> None:
    paths = _golden_megatron(tmp_path)
    (tmp_path / "X.idx").write_bytes(MEGATRON_INDEX + bytes(2))
    assert _read(megatron_files(paths)) == [1, 2, 3, 4, 5]


def _patched(at: int, content: str) -> bytes:
    found = bytearray(MEGATRON_INDEX)
    new = bytes.fromhex(content)
    found[at : at + len(new)] = new
    return bytes(found)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (MEGATRON_INDEX[:33], r"X.idx has 33 bytes, and the header of a Megatron index alone has 34"),
        (b"", r"X.idx has 0 bytes, and the header"),
        (b"PK" + MEGATRON_INDEX[2:], r"X.idx begins with b'PK.* and not with b'MMIDIDX"),
        (_patched(9, "02"), r"X.idx is a Megatron index of version 2; version 1 alone is read"),
        (_patched(17, "07"), r"X.idx says that its numbers are float32 \(dtype 7\); tokens are integers"),
        (_patched(17, "09"), r"X.idx says that its numbers are of no type that Megatron has \(dtype 9\)"),
        (_patched(18, "03"), r"X.idx has 82 bytes; with the 3 sequences and 3 ends of documents .* it has 94"),
        (_patched(18, "ffffffffffffffff"), r"X.idx has 82 bytes; with the 18,446,744,073,709,551,615 sequences"),
        (_patched(26, "0000000000000000"), r"X.idx has 82 bytes; with the 2 sequences and 0 ends"),
        (MEGATRON_INDEX[:-1], r"X.idx has 81 bytes; with the 2 sequences"),
        (_patched(42, "02"), r"X.idx says that tokens of 2 bytes lie from byte 2 to 10"),
        (_patched(50, "07"), r"X.idx says that tokens of 2 bytes lie from byte 0 to 11"),
        (_patched(38, "0300"), r"X.bin has 10 bytes, and by X.idx it has 12"),
        (_patched(58, "01"), r"X.idx says that documents are the sequences \(1, 2\), and has 0 to 2"),
        (_patched(74, "05"), r"X.idx says that documents are the sequences \(0, 5\), and has 0 to 2"),
    ],
    ids=_named,
)
def test_a_damaged_megatron_index_is_refused_by_name(tmp_path: Path, index: bytes, message: str) -> None:
    paths = _golden_megatron(tmp_path)
    (tmp_path / "X.idx").write_bytes(index)
    with pytest.raises(InvalidJobError, match=message):
        megatron_files(paths)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (_patched(34, "0200"), r"says that sequence 1 does not begin where the last one ends"),
        (_patched(66, "03"), r"says that document 1 ends before it begins"),
    ],
    ids=_named,
)
def test_tables_that_contradict_themselves_are_found_when_all_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: bytes, message: str
) -> None:
    (tmp_path / "X.idx").write_bytes(index)
    for portion in (1, 2, 100):
        monkeypatch.setattr(megatron, "_PORTION", portion)
        with pytest.raises(InvalidJobError, match=message):
            verify(read_index(tmp_path / "X.idx"))


def test_megatron_tokens_without_their_index_are_named(tmp_path: Path) -> None:
    paths = _golden_megatron(tmp_path)
    (tmp_path / "X.idx").unlink()
    with pytest.raises(InvalidJobError, match=r"X.idx is missing"):
        megatron_files(paths)
    _golden_megatron(tmp_path)
    (tmp_path / "X.bin").unlink()
    with pytest.raises(InvalidJobError, match=r"X.bin is missing, which belongs to .*X.idx"):
        megatron_files(paths)


@pytest.mark.parametrize(
    ("metadata", "index", "message"),
    [
        ("gpt2\n5\n5 T", None, r"X.ds.metadata does not say how many bytes a token has.*append \|2 .* or \|4"),
        ("gpt2|8\n5\n", None, r"X.ds.metadata says .*'gpt2\|8'.*: it was cut or changed"),
        ("gpt2|2\nmany\n", None, r"X.ds.metadata says .*'many'"),
        ("gpt2|2", None, r"X.ds.metadata says \['gpt2\|2'\]"),
        ("gpt2|4\n5\n", None, r"X.ds has 10 bytes, and by X.ds.metadata it has 20"),
        ("gpt2|2\n4\n", None, r"X.ds has 10 bytes, and by X.ds.metadata it has 8"),
        ("gpt2|2\n5\n", bytes(7), r"X.ds.index has 7 bytes, and each entry has 8"),
        ("gpt2|2\n5\n", b"\x04" + bytes(7), r"X.ds.index says that documents end at token 4, and X.ds has 5 tokens"),
        (None, None, r"X.ds.metadata is missing, which belongs to .*X.ds;"),
    ],
)
def test_damaged_nanotron_files_are_refused_by_name(
    tmp_path: Path, metadata: str | None, index: bytes | None, message: str
) -> None:
    paths = _golden_nanotron(tmp_path)
    if index is not None:
        (tmp_path / "X.ds.index").write_bytes(index)
    if metadata is None:
        (tmp_path / "X.ds.metadata").unlink()
    else:
        (tmp_path / "X.ds.metadata").write_text(metadata)
    with pytest.raises(InvalidJobError, match=message):
        nanotron_files(paths)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FIVE, r"X.npy does not begin with .*NUMPY.* its format is Raw, and its dtype must be given"),
        (b"", r"X.npy does not begin with"),
        (NUMPY_HEADER[:40], r"X.npy has no header that numpy reads \(EOF"),
        (NUMPY_HEADER[:6] + b"\x03\x00" + NUMPY_HEADER[8:] + FIVE, r"X.npy has no header that numpy reads \(version"),
        (NUMPY_HEADER.replace(b"<u2", b"<f2") + FIVE, r"X.npy holds an array of float16 of the shape \(5,\)"),
        (NUMPY_HEADER.replace(b"(5,), ", b"(5,1),") + FIVE, r"X.npy holds an array of uint16 of the shape \(5, 1\)"),
        (NUMPY_HEADER.replace(b"<u2", b"|O8") + FIVE, r"X.npy holds an array of object"),
        (NUMPY_HEADER + FIVE[:-1], r"X.npy has 137 bytes, and by its header it has 138"),
        (NUMPY_HEADER + FIVE + b"\0", r"X.npy has 139 bytes, and by its header it has 138"),
    ],
    ids=_named,
)
def test_a_damaged_numpy_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "X.npy").write_bytes(content)
    with pytest.raises(InvalidJobError, match=message):
        numpy_files([tmp_path / "X.npy"])


def test_a_raw_file_with_a_header_or_half_a_token_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidJobError, match=r"X.npy has a header of numpy.* its format is NumPy"):
        _raw(_golden_numpy(tmp_path))
    (tmp_path / "X.npy").write_bytes(FIVE[:-1])
    with pytest.raises(InvalidJobError, match=r"X.npy has 9 bytes, which is no whole number of uint16"):
        _raw([tmp_path / "X.npy"])
