"""The same documents in every format make the same token files."""

import gzip
import re
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from pseudoreal_trainer.data.prepare import encoding
from pseudoreal_trainer.data.prepare.formats import compressed, text_files
from pseudoreal_trainer.data.prepare.group import Work, prepare_group
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.reading.files import LocalFile
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.tokenizer.tokenizer import Tokenizer, load_tokenizer
from pseudoreal_trainer.errors import InvalidJobError

from tests.unit.trainer.data.conftest import drawn_texts
from tests.unit.trainer.data.prepare.support import corpora
from tests.unit.trainer.data.prepare.support.silent import Silent

TEXTS = [*drawn_texts(120_000)]
SETTINGS = Settings(shard_bytes=20_000)


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "inputs").mkdir()
    return tmp_path / "inputs"


def _prepared(path: Path, tokenizer: Tokenizer, settings: Settings = SETTINGS) -> dict[str, bytes]:
    """Prepare the inputs; return name -> content of the shards' files."""
    [group] = groups_of(find_inputs([path]))
    output = path.parent / "tokens"
    output.mkdir(exist_ok=True)
    record = prepare_group(Work(group, settings, output), tokenizer, Silent())
    assert record.is_finished
    return {file.name: file.read_bytes() for file in sorted(output.iterdir()) if file.is_file()}


def _documents(files: dict[str, bytes], end: int) -> list[list[int]]:
    """Return the documents in order, without their end tokens, from the files' bytes alone."""
    found = []
    for name in sorted(name for name in files if name.endswith(".bin")):
        tokens = np.frombuffer(files[name], "<u2")
        lengths = np.frombuffer(files[name.replace(".bin", ".lengths")], "<u4")
        parts = np.split(tokens, np.cumsum(lengths))
        assert len(parts.pop()) == 0
        assert all(part[-1] == end for part in parts)
        found += [part[:-1].tolist() for part in parts]
    return found


@pytest.fixture(scope="module")
def expected(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The shards of the text as JSON lines; they contain every document once."""
    inputs = tmp_path_factory.mktemp("expected") / "inputs"
    inputs.mkdir()
    files = _prepared(corpora.write_jsonl(inputs, TEXTS), tokenizer)
    documents = _documents(files, tokenizer.end_of_document)
    assert sorted(documents) == sorted(tokenizer.encode(text).tolist() for text in TEXTS)
    assert sum(name.endswith(".bin") for name in files) == 4
    return files


@pytest.mark.parametrize(
    "write",
    [
        corpora.write_gzip,
        corpora.write_zstandard,
        corpora.write_parquet,
        corpora.write_text,
        corpora.write_mds_text,
    ],
)
def test_text(
    write: Callable[[Path, Sequence[str]], Path], folder: Path, tokenizer: Tokenizer, expected: dict[str, bytes]
) -> None:
    assert _prepared(write(folder, TEXTS), tokenizer) == expected


@pytest.mark.parametrize("kind", ["rows that cut documents", "arrays", "Fast-LLM"])
def test_tokens(kind: str, folder: Path, tokenizer: Tokenizer, expected: dict[str, bytes]) -> None:
    """Inputs that are already tokens give the same shards, text sizes included, as the text."""
    documents = [[*tokenizer.encode(text).tolist(), tokenizer.end_of_document] for text in TEXTS]
    settings = SETTINGS.model_copy(update={"text_field": "tokens"})
    match kind:
        case "arrays":
            path = corpora.write_arrays(folder, documents)
        case "Fast-LLM":
            path = corpora.write_fast_llm(folder / "a.fast_llm_dataset", documents)
        case _:
            path = corpora.write_foundry(folder, documents, row=96)
    assert _prepared(path, tokenizer, settings) == expected


def test_documents_are_shuffled_inside_of_shards(expected: dict[str, bytes], tokenizer: Tokenizer) -> None:
    places = {tuple(tokenizer.encode(text).tolist()): number for number, text in enumerate(TEXTS)}
    order = [places[tuple(each)] for each in _documents(expected, tokenizer.end_of_document)]
    bounds = np.cumsum([len(content) // 4 for name, content in expected.items() if name.endswith(".lengths")])
    shards = [part.tolist() for part in np.split(np.array(order), bounds)[:-1]]
    assert [number for shard in shards for number in sorted(shard)] == [*range(len(TEXTS))]
    assert all(shard != sorted(shard) for shard in shards)


def test_packed_shards_are_rows(folder: Path, tokenizer: Tokenizer) -> None:
    settings = Settings(shard_bytes=20_000, sequence=256)
    files = _prepared(corpora.write_jsonl(folder, TEXTS), tokenizer, settings)
    documents = _documents(files, tokenizer.end_of_document)
    encoded = [tokenizer.encode(text).tolist() for text in TEXTS]
    assert sorted(each for each in documents if each) == sorted(encoded)
    assert any(len(each) > 600 for each in encoded)
    at = 0
    for each in documents:
        length = len(each) + 1
        assert (at + length - 1) // 256 - at // 256 + 1 == -(-length // 256)
        at += length
    assert all(len(content) % 512 == 0 for name, content in files.items() if name.endswith(".bin"))


class TestLongDocuments:
    """Long documents are encoded in pieces, so that memory is bounded."""

    @pytest.fixture(autouse=True)
    def _short_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(text_files, "PIECE", 200)

    def test_pieces_end_at_lines_that_no_space_follows(self) -> None:
        text = "".join(TEXTS)
        pieces = [*text_files.pieces(text)]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) <= 200
        for piece, following in pairwise(pieces):
            is_line = piece.endswith("\n") and not following[0].isspace()
            assert is_line or not re.search(r"\n\S", piece)

    @pytest.mark.parametrize("text", ["x" * 1000, "\n" * 1000, "x y" * 500, " " * 300 + "\n" + " " * 300, ""])
    def test_text_without_such_lines_is_cut_all_the_same(self, text: str) -> None:
        assert "".join(text_files.pieces(text)) == text

    def test_a_file_is_cut_as_a_text_is(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """For any chunk size of the reads, even one that cuts characters."""
        text = "".join(TEXTS) + "é漢🏖" * 100
        (folder / "a.txt").write_text(text)
        monkeypatch.setattr("pseudoreal_trainer.data.prepare.formats.compressed._PORTION", 77)
        [record] = text_files.text_records(LocalFile.found(folder / "a.txt"))
        assert [*record.content()] == [*text_files.pieces(text)]

    def test_their_tokens_are_mostly_those_of_the_whole(self, folder: Path, tokenizer: Tokenizer) -> None:
        """All of them, if pieces end at line ends: the tokenizer's pattern splits there anyway."""
        text = "\n".join(line.strip() for line in "".join(TEXTS).splitlines() if line.strip())
        (folder / "a.txt").write_text(text)
        [document] = _documents(_prepared(folder, tokenizer), tokenizer.end_of_document)
        assert document == tokenizer.encode(text).tolist()


class TestDamaged:
    """Truncated files are rejected by name; none is silently read as shorter."""

    @pytest.mark.parametrize("write", [corpora.write_gzip, corpora.write_zstandard, corpora.write_parquet])
    def test_compressed_files(
        self, write: Callable[[Path, Sequence[str]], Path], folder: Path, tokenizer: Tokenizer
    ) -> None:
        path = write(folder, TEXTS)
        content = path.read_bytes()
        for cut in (content[:-1], content[: len(content) // 3], content[:5], content[:-20] + b"\0" * 20):
            path.write_bytes(cut)
            with pytest.raises(InvalidJobError, match=path.name):
                _prepared(path, tokenizer, Settings(most_malformed=1000))

    def test_mds(self, folder: Path, tokenizer: Tokenizer) -> None:
        corpora.write_mds_text(folder, TEXTS)
        shard = folder / "shard.00001.mds"
        content = shard.read_bytes()
        for damaged in (content[:-1], content[:10], content[:4], b"", b"\1" + content[1:]):
            shard.write_bytes(damaged)
            with pytest.raises(InvalidJobError, match=r"shard.00001.mds has .* is not the shard"):
                _prepared(folder, tokenizer)
        first = int(np.frombuffer(content[4:8], "<u4")[0])
        shard.write_bytes(content[:first] + b"\xff" + content[first + 1 :])
        with pytest.raises(InvalidJobError, match=r"sample 1 of shard.00001.mds is not a row"):
            _prepared(folder, tokenizer)
        shard.unlink()
        with pytest.raises(InvalidJobError, match=r"shard.00001.mds is missing"):
            _prepared(folder, tokenizer)
        (folder / "index.json").write_text('{"version": 1, "shards": []}')
        with pytest.raises(InvalidJobError, match=r"index.json is no index of MDS version 2: version"):
            _prepared(folder, tokenizer)

    @pytest.mark.parametrize("encoding", ["pkl", "float32", "ndarray:float32"])
    def test_columns_of_mds_that_are_neither_text_nor_tokens(
        self, encoding: str, folder: Path, tokenizer: Tokenizer
    ) -> None:
        corpora.write_mds(folder, {"text": (encoding, None)}, [[{"text": b"\x80\x04K\x01."}]])
        with pytest.raises(InvalidJobError, match=rf"the column 'text' .* holds {encoding}"):
            _prepared(folder, tokenizer)

    def test_fast_llm(self, folder: Path, tokenizer: Tokenizer) -> None:
        path = corpora.write_fast_llm(folder / "a.fast_llm_dataset", [[5, 6, 1], [7, 1]])
        content = path.read_bytes()
        for damaged in (b"", content[:20], content[:-1], content[:41] + b"X" + content[42:], b"x" + content):
            path.write_bytes(damaged)
            with pytest.raises(InvalidJobError, match=r"a.fast_llm_dataset is no sound file of Fast-LLM"):
                _prepared(path, tokenizer)

    def test_columns_of_parquet_that_are_not_text(self, folder: Path, tokenizer: Tokenizer) -> None:
        path = corpora.write_parquet(folder, TEXTS)
        for field, said in (("words", "has no column 'words'; its columns are id, text"), ("id", "holds int64")):
            with pytest.raises(InvalidJobError, match=said):
                _prepared(path, tokenizer, Settings(text_field=field))


class TestBombs:
    """A small file may expand beyond any memory."""

    SIZE = 64 << 20

    @pytest.fixture(params=["gz", "zst"])
    def bomb(self, request: pytest.FixtureRequest, folder: Path) -> Path:
        """Zeros, in two members or frames."""
        import pyarrow

        path, half = folder / f"a.txt.{request.param}", b"\0" * (self.SIZE // 2)
        part = gzip.compress(half) if request.param == "gz" else pyarrow.compress(half, "zstd", asbytes=True)
        path.write_bytes(2 * part)
        assert path.stat().st_size < self.SIZE // 500
        return path

    def test_no_more_is_decompressed_at_a_time_than_a_portion(self, bomb: Path) -> None:
        tracemalloc.start()
        try:
            sizes = [len(content) for content, _ in compressed.read_chunks(LocalFile.found(bomb))]
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sum(sizes) == self.SIZE
        assert max(sizes) == 1 << 20
        assert most < 8 << 20

    def test_what_fills_a_portion_exactly_is_whole(self, folder: Path) -> None:
        """The last bytes that gzip has buffered must be read after the end of the file."""
        for size in ((1 << 20) - 1, 1 << 20, (1 << 20) + 1, 1 << 21):
            (folder / "a.txt.gz").write_bytes(gzip.compress(bytes(size)))
            chunks = [content for content, _ in compressed.read_chunks(LocalFile.found(folder / "a.txt.gz"))]
            assert b"".join(chunks) == bytes(size)

    def test_a_line_that_is_too_long_is_named_and_the_others_are_read(
        self, folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text_files, "MOST_LINE_BYTES", 1 << 20)
        texts = ["short", "x" * (1 << 20), "short as well", "y" * (3 << 20)]
        path = corpora.write_gzip(folder, texts)
        with pytest.raises(
            InvalidJobError, match=r"line 4 cannot be used .*: it has more than 1,048,576 bytes; cut it"
        ):
            _prepared(path, tokenizer, Settings(most_malformed=1))
        files = _prepared(path, tokenizer, Settings(most_malformed=2))
        found = [tokenizer.decode(each) for each in _documents(files, tokenizer.end_of_document)]
        assert sorted(found) == ["short", "short as well"]

    def test_a_document_that_no_shard_has_room_for_is_given_up_when_that_is_known(
        self, bomb: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The decision must not wait until the whole document is decompressed, which may never end."""
        monkeypatch.setattr(encoding, "MOST_SHARD_BYTES", 1 << 20)
        taken, chunks = [], compressed.read_chunks

        def counted(file: LocalFile) -> Iterator[tuple[bytes, int]]:
            for content, position in chunks(file):
                taken.append(len(content))
                yield b"words and others " * (len(content) // 17), position

        monkeypatch.setattr(text_files, "read_chunks", counted)
        with pytest.raises(InvalidJobError, match=r"as a whole cannot be used: it has .* tokens or more, and a shard"):
            _prepared(bomb, tokenizer)
        assert sum(taken) < self.SIZE // 4

    def test_a_shard_of_mds_has_no_more_bytes_than_its_index_says(self, folder: Path, tokenizer: Tokenizer) -> None:
        corpora.write_mds_text(folder, TEXTS)
        shard = folder / "shard.00001.mds"
        shard.write_bytes(shard.read_bytes() + bytes(8 << 20))
        with pytest.raises(InvalidJobError, match=r"shard.00001.mds has more than the [\d,]+ bytes that index.json"):
            _prepared(folder, tokenizer)
