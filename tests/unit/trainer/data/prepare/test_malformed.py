"""Malformed documents are counted; beyond a limit, an error says where they are."""

import json
from pathlib import Path

import pytest
from pseudoreal_trainer.data.prepare.group import GroupRecord, Work, prepare_group
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer
from pseudoreal_trainer.errors import InvalidJobError, TrainingError

from tests.unit.trainer.data.prepare.support.silent import Silent

BAD = {
    b"{": r"it is not JSON \(Expecting",
    b"\xff": r"it is not JSON \('utf-8' codec",
    b"[" * 100_000: r"it is not JSON \(maximum recursion",
    b'"text"': "it is no object with a text in 'text'",
    b'{"texts": "a"}': "it is no object with a text in 'text'",
    b'{"text": null}': "it is no object with a text in 'text'",
    b'{"text": 5}': "it is no object with a text in 'text'",
    b'{"text": "\\ud800"}': "it is no Unicode",
    b'{"text": "a\\u0000b"}': "it has the token 0 inside, which ends documents",
}


def _prepared(file: Path, most_malformed: int) -> GroupRecord:
    [group] = groups_of(find_inputs([file]))
    settings = Settings(most_malformed=most_malformed, shard_bytes=10)
    file.with_suffix(".tokens").mkdir(exist_ok=True)
    return prepare_group(Work(group, settings, file.with_suffix(".tokens")), ByteTokenizer(), Silent())


@pytest.mark.parametrize("line", BAD, ids=lambda line: repr(line[:20]))
def test_the_first_one_is_named(line: bytes, tmp_path: Path) -> None:
    good = json.dumps({"text": "good"}).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, b"", good, line, good]))
    with pytest.raises(InvalidJobError, match=rf"a.jsonl line 4 cannot be used: {BAD[line]}"):
        _prepared(tmp_path / "a.jsonl", 0)


def test_as_many_as_are_allowed_are_left_out(tmp_path: Path) -> None:
    """The first one over the limit is named, also by a run that resumes after the earlier ones."""
    good = json.dumps({"text": "good"}).encode()
    lines = [line for bad in BAD for line in (bad, good)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    record = _prepared(tmp_path / "a.jsonl", len(BAD))
    assert record.malformed == len(BAD)
    assert sum(done.shard.documents for done in record.shards) == len(BAD)

    for attempt in range(2):
        (tmp_path / "b.jsonl").write_bytes(b"\n".join([*lines, b"{"]))
        with pytest.raises(InvalidJobError, match=rf"b.jsonl line 19 cannot be used after {len(BAD)} others"):
            _prepared(tmp_path / "b.jsonl", len(BAD))
        kept = [*(tmp_path / "b.tokens").glob("*.bin")]
        assert len(kept) == len(BAD), attempt


def test_text_that_is_not_utf8_is_malformed_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good" * 1000 + b"\xc3")
    with pytest.raises(InvalidJobError, match=r"a.txt as a whole cannot be used: it is not UTF-8 \(unexpected end"):
        _prepared(tmp_path / "a.txt", 0)


def test_documents_without_text_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": "a"}\n{"text": ""}\n')
    [done] = _prepared(tmp_path / "a.jsonl", 0).shards
    assert (done.shard.documents, done.shard.tokens, done.records) == (1, 2, 3)


def test_a_file_that_is_being_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    [group] = groups_of(find_inputs([tmp_path / "a.jsonl"]))
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('{"text": "b"}\n')
    with pytest.raises(TrainingError, match=r"a.jsonl had 14 bytes and has 28 now: it is being written"):
        prepare_group(Work(group, Settings(), tmp_path), ByteTokenizer(), Silent())
