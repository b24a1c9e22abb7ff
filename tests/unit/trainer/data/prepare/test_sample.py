"""Samples of text for training a tokenizer."""

import json
from pathlib import Path

import pytest
from pseudoreal_trainer.data.prepare.inputs import find_inputs
from pseudoreal_trainer.data.prepare.sample import sampled_texts
from pseudoreal_trainer.errors import InvalidJobError

from tests.unit.trainer.data.prepare.support.corpora import write_fast_llm


def sample(folder: Path, most_bytes: int) -> list[str]:
    return [*sampled_texts(find_inputs([folder]), "text", most_bytes, lambda _: None)]


def write(file: Path, *documents: str) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))


def test_empty_document_does_not_end_the_sample_of_its_input(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "", "abc")
    assert sample(tmp_path, 1000) == ["abc"]


@pytest.mark.parametrize("most", [1, 2, 999, 1000, 1001])
def test_sample_of_long_characters_has_as_many_bytes_as_were_asked_for(most: int, tmp_path: Path) -> None:
    """Each character has three bytes; a character across the bound is left out."""
    write(tmp_path / "a.jsonl", *(10 * ["世界" * 1000]))
    texts = sample(tmp_path, most)
    assert "".join(texts) == ("世界" * 1000)[: most // 3]
    assert len(texts) <= 1, "nothing is read after the bound"


def test_bound_holds_across_documents(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", *(100 * ["é" * 30]))
    texts = sample(tmp_path, 1000)
    assert [len(text) for text in texts] == [30] * 16 + [20]


def test_inputs_have_shares_in_proportion_to_their_sizes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a" * 3000)
    (tmp_path / "b.txt").write_text("b" * 1000)
    assert sample(tmp_path, 400) == ["a" * 300, "b" * 100]


def test_progress_is_the_number_of_bytes_so_far(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", "世", "", "ab", "c" * 1000)
    told: list[int] = []
    for _ in sampled_texts(find_inputs([tmp_path]), "text", 100, told.append):
        pass
    assert told == [3, 3, 5, 100]


def test_document_that_is_no_unicode_is_sampled_without_its_fault(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n')
    assert sample(tmp_path, 1000) == ["a?b"]


def test_tokens_are_refused(tmp_path: Path) -> None:
    write_fast_llm(tmp_path / "a.fast_llm_dataset", [[1, 2], [3]])
    with pytest.raises(InvalidJobError, match="holds tokens, and a tokenizer is trained on text; leave it out"):
        sample(tmp_path, 1000)
