"""`pseudoreal data train-tokenizer`, `prepare` and `inspect`."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.data_progress import PrepareDisplay
from pseudoreal_trainer.data.prepare.workers import Totals
from rich.console import Console

from tests.unit.trainer.data.conftest import drawn_texts
from tests.unit.trainer.data.prepare.support.corpora import json_lines

TEXTS = ["first document", "the second one", "a third, which is the longest of them all"]


def _invoke(*arguments: object) -> Any:
    return CliRunner().invoke(main, ["data", *map(str, arguments)])


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_bytes(json_lines([*TEXTS, *drawn_texts(30_000)], "content"))
    return tmp_path / "a.jsonl"


@pytest.mark.needs("tokenizers")
def test_data_commands_turn_text_into_tokens(corpus: Path, tmp_path: Path) -> None:
    """All three commands in sequence, as shown in docs/data.md."""
    for name in ("tokenizer", "again"):
        train = ["train-tokenizer", corpus, "--output", tmp_path / name, "--text-field", "content"]
        done = _invoke(*train, "--vocabulary-size", "600")
        assert done.exit_code == 0, done.output
        assert "tokenizer.json: 600 tokens" in done.stdout
    content = (tmp_path / "tokenizer" / "tokenizer.json").read_bytes()
    assert content == (tmp_path / "again" / "tokenizer.json").read_bytes()
    refused = _invoke(*train, "--vocabulary-size", "600")
    assert (refused.exit_code, "exists, and is not replaced" in refused.stderr) == (78, True)

    prepare = ["prepare", corpus, "--tokenizer", tmp_path / "tokenizer", "--text-field", "content", "--workers", "1"]
    done = _invoke(*prepare, "--output", tmp_path / "tokens", "--pack", "best-fit", "128")
    assert done.exit_code == 0, done.output
    assert " documents, " in done.stdout
    assert "% padding" in done.stdout

    inspect = ["inspect", tmp_path / "tokens", "--tokenizer", tmp_path / "tokenizer", "--documents", "1000", "--verify"]
    found = json.loads(_invoke(*inspect, "--json").stdout)
    assert (found["format"], found["dtype"], found["vocabulary"], found["shards"]) == ("native", "uint16", 600, 1)
    assert (found["packed_for"], found["tokens"] % 128) == (128, 0)
    assert {f"{text}<|eos|>" for text in TEXTS} < {*found["first_documents"]}
    assert f"tokens           {found['tokens']:,}\n" in _invoke(*inspect).stdout
    other = _invoke("inspect", tmp_path / "tokens", "--tokenizer", "bytes")
    assert "bytes is not the tokenizer of these files" in other.stderr

    tokens = tmp_path / "tokens" / "00000.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2] + b"\0\0")
    refused = _invoke(*inspect)
    assert (refused.exit_code, "00000.bin has the SHA-256" in refused.stderr) == (78, True)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    assert "00000.bin has" in _invoke("inspect", tmp_path / "tokens").stderr


@pytest.mark.needs("tokenizers")
def test_tokenizer_sample_has_a_share_of_every_input(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("aabb " * 1000)
    (tmp_path / "b.txt").write_text("ccdd " * 1000)
    train = ["train-tokenizer", tmp_path, "--output", tmp_path / "t", "--vocabulary-size", "300"]
    assert "(300 were asked for; the text has no more pairs)" in _invoke(*train, "--sample-bytes", "400").stdout
    merges = json.loads((tmp_path / "t" / "tokenizer.json").read_text())["model"]["merges"]
    assert {("a", "a"), ("c", "c")} < {tuple(merge) for merge in merges}


@pytest.mark.needs("tokenizers")
def test_errors_of_data_commands_are_sentences(corpus: Path, tmp_path: Path) -> None:
    for said, arguments in (
        ("a.jsonl line 1 cannot be used: it is no object with a text in 'text'", ["--tokenizer", "bytes"]),
        ("the tokenizer nowhere cannot be read", ["--tokenizer", "nowhere"]),
    ):
        found = _invoke("prepare", corpus, "--output", tmp_path / "tokens", "--workers", "1", *arguments)
        assert (found.exit_code, said in found.stderr) == (78, True), found.output
    train = ["train-tokenizer", corpus, "--output", tmp_path / "t", "--vocabulary-size"]
    assert _invoke(*train, "100").exit_code == 2


class TestForeignFiles:
    """Files written byte by byte according to the descriptions of their formats."""

    def _megatron(self, folder: Path) -> Path:
        """Write [[1, 2, 3], [4, 5]]: two documents of one sequence each."""
        header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
        tables = np.array([3, 2], "<i4").tobytes() + np.array([0, 6], "<i8").tobytes()
        (folder / "x.idx").write_bytes(header + tables + np.array([0, 1, 2], "<i8").tobytes())
        (folder / "x.bin").write_bytes(np.array([1, 2, 3, 4, 5], "<u2").tobytes())
        return folder / "x.idx"

    def _nanotron(self, folder: Path) -> Path:
        (folder / "x.ds").write_bytes(np.array([1, 2, 3, 4, 5], "<u4").tobytes())
        (folder / "x.ds.index").write_bytes(np.array([3, 5], "<u8").tobytes())
        (folder / "x.ds.metadata").write_text("bytes|4\n5\n5 T")
        return folder / "x.ds"

    def _numpy(self, folder: Path) -> Path:
        np.save(folder / "x.npy", np.array([1, 2, 3, 4, 5], np.uint16))
        return folder / "x.npy"

    @pytest.mark.parametrize("kind", ["megatron", "nanotron", "numpy", "bare"])
    def test_inspect_describes_foreign_token_files(self, kind: str, tmp_path: Path) -> None:
        """Formats without a table of documents are split at the end-of-document token."""
        arguments: list[str] = []
        match kind:
            case "megatron":
                path = self._megatron(tmp_path)
            case "nanotron":
                path = self._nanotron(tmp_path)
            case "numpy":
                path = self._numpy(tmp_path)
            case _:
                path = tmp_path / "x.raw"
                path.write_bytes(bytes([1, 2, 3, 4, 5]))
                arguments = ["--dtype", "uint8"]
        shown = ["--tokenizer", "bytes", "--end-of-document", "3", "--json"]
        done = _invoke("inspect", path, "--verify", *shown, *arguments)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        has_table = kind in ("megatron", "nanotron")
        assert found["tokens"] == 5
        assert found.get("documents") == (2 if has_table else None)
        assert found["first_documents"] == ["\1\2\3", "\4\5"][: 2 if has_table else 1]

    def test_inspect_names_a_damaged_file(self, tmp_path: Path) -> None:
        for path in (self._megatron(tmp_path), self._nanotron(tmp_path), self._numpy(tmp_path)):
            content = path.read_bytes()
            path.write_bytes(content[:-1])
            found = _invoke("inspect", path)
            assert (found.exit_code, path.name in found.stderr) == (78, True), found.output
        found = _invoke("inspect", tmp_path)
        assert "index.json is not there" in found.stderr
        (tmp_path / "x.txt").write_text("text")
        assert "is of no format that is known by its name" in _invoke("inspect", tmp_path / "x.txt").stderr


def test_progress_without_a_terminal_is_a_line_every_ten_seconds() -> None:
    now = [0.0]
    console = Console(force_terminal=False, width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    with PrepareDisplay(console, lambda: now[0]) as display:
        for second in range(25):
            now[0] = float(second)
            display.tick(Totals(1 << 20, 4_000_000, 1_000_000, 50, 2), 2 << 20)
    lines = console.export_text().splitlines()
    assert lines[0] == (
        "preparing: 1.00 MiB of 2.00 MiB read, 0.40 MB/s, 100,000 tokens/s, 50 documents, 1,000,000 tokens, 2 malformed"
    )
    assert len(lines) == 2
