import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pseudoreal_trainer.data.tokenizer.token_bytes import bits_per_byte
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, load_tokenizer
from pseudoreal_trainer.data.tokenizer.train import BEGIN, END, train_tokenizer, write_tokenizer
from pseudoreal_trainer.errors import InvalidJobError
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers, processors

from tests.unit.trainer.data.conftest import MEGABYTE, drawn_texts

unicode = st.text(st.characters(exclude_categories=["Cs"]))


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> Tokenizer:
    return load_tokenizer(tokenizer_folder)


def _files(folder: Path, *, tokenizer_config: Any = None, config: Any = None) -> Path:
    """Write a byte-level tokenizer with two special tokens, and the given configuration files beside it."""
    library = Library(models.BPE(vocab={character: number for number, character in enumerate("abc")}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens([BEGIN, END])
    library.save(str(folder / "tokenizer.json"))
    for name, content in (("tokenizer_config.json", tokenizer_config), ("config.json", config)):
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    return folder


class TestTraining:
    def test_the_same_text_gives_the_same_bytes(self) -> None:
        texts = [*drawn_texts(MEGABYTE)]
        assert sum(map(len, texts)) == MEGABYTE
        found = train_tokenizer(texts, 2048)
        assert found == train_tokenizer(texts, 2048)
        assert len(json.loads(found)["model"]["vocab"]) == 2048

    def test_a_vocabulary_without_room_for_all_bytes_is_refused(self) -> None:
        with pytest.raises(InvalidJobError, match="ask for 258 tokens at least"):
            train_tokenizer(["text"], 257)

    def test_transformers_reads_what_is_written(self, tokenizer_folder: Path) -> None:
        from transformers import AutoTokenizer

        ours, theirs = load_tokenizer(tokenizer_folder), AutoTokenizer.from_pretrained(tokenizer_folder)
        text = "def words(text: str) -> list[str]:\n    return text.split()  # ’s"
        assert theirs.eos_token_id == ours.end_of_document
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text).tolist()


class TestText:
    @settings(deadline=None)
    @given(unicode)
    def test_it_comes_back_and_its_bytes_are_those_of_its_tokens(self, tokenizer: Tokenizer, text: str) -> None:
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode())

    @settings(deadline=None)
    @given(unicode)
    def test_bytes_are_tokens(self, text: str) -> None:
        tokenizer = ByteTokenizer()
        tokens = tokenizer.encode(text)
        assert tokens.tolist() == [*text.encode()]
        assert tokenizer.decode(tokens) == text
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode()) - text.count("\0")

    def test_bytes_of_a_token_are_not_those_that_it_decodes_to(self, tokenizer: Tokenizer) -> None:
        """A part of a character decodes to a replacement character of three bytes."""
        decoded = [len(tokenizer.decode([token]).encode()) for token in range(tokenizer.vocabulary)]
        assert (tokenizer.token_bytes != decoded).sum() > 100

    def test_a_special_string_stays_text(self, tokenizer_folder: Path, tokenizer: Tokenizer) -> None:
        text = f"a{END}b{BEGIN}"
        tokens = tokenizer.encode(text)
        assert tokenizer.end_of_document not in tokens
        assert tokenizer.decode(tokens) == text
        naive = Library.from_file(str(tokenizer_folder / "tokenizer.json"))
        assert tokenizer.end_of_document in naive.encode(text, add_special_tokens=False).ids, "the trap is still there"

    def test_limits_and_additions_of_the_file_have_no_effect(self, tokenizer_folder: Path, tmp_path: Path) -> None:
        library = Library.from_file(str(tokenizer_folder / "tokenizer.json"))
        library.enable_truncation(4)
        library.enable_padding(length=100)
        library.post_processor = processors.TemplateProcessing(f"{BEGIN} $A {END}", None, [(BEGIN, 0), (END, 1)])
        library.save(str(tmp_path / "tokenizer.json"))
        text = "several words of text"
        found = load_tokenizer(tmp_path, 1).encode(text)
        assert found.tolist() == load_tokenizer(tokenizer_folder).encode(text).tolist()
        assert len(found) > 4


def _falling_back(*, falls_back: bool = True) -> dict[str, Any]:
    """Return a tokenizer like Llama 2's: SentencePiece's spaces, and tokens for bytes that no other token covers."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "é", "▁a"]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": pieces[number], "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for number in range(3)
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": falls_back,
            "ignore_merges": False,
            "vocab": {piece: number for number, piece in enumerate(pieces)},
            "merges": [["▁", "a"]],
        },
    }


def _loaded(folder: Path, description: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_text(json.dumps(description))
    return load_tokenizer(folder, 2)


@pytest.fixture(scope="module")
def falling_back(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return _loaded(tmp_path_factory.mktemp("fallback"), _falling_back())


class TestTokensOfTokenizersThatFallBackToBytes:
    @settings(deadline=None)
    @given(st.text(st.sampled_from("ab é漢🏖<0x")))
    def test_their_bytes_are_those_of_the_text(self, falling_back: Tokenizer, text: str) -> None:
        tokens = falling_back.encode(text)
        assert falling_back.decode(tokens) == text
        assert falling_back.token_bytes[tokens].sum() == len(text.encode())

    def test_those_that_lose_text_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError, match="use a byte-level BPE"):
            _ = _loaded(tmp_path, _falling_back(falls_back=False)).token_bytes


class TestTheEndOfDocuments:
    @pytest.mark.parametrize(
        "files",
        [
            {"tokenizer_config": {"eos_token": END}},
            {"tokenizer_config": {"eos_token": {"content": END, "lstrip": False}}},
            {"tokenizer_config": {"eos_token": END}, "config": {"eos_token_id": 3}},
            {"config": {"eos_token_id": 4}},
            {"tokenizer_config": {"eos_token": None}, "config": {"eos_token_id": [4, 3]}},
        ],
    )
    def test_it_is_what_the_files_say(self, tmp_path: Path, files: dict[str, Any]) -> None:
        tokenizer = load_tokenizer(_files(tmp_path, **files))
        assert tokenizer.end_of_document == 4
        assert tokenizer.token_bytes.tolist() == [1, 1, 1, 0, 0]

    def test_a_given_one_goes_first(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(_files(tmp_path, tokenizer_config={"eos_token": END}), 1)
        assert tokenizer.end_of_document == 1
        assert tokenizer.token_bytes.tolist() == [1, 0, 1, 0, 0]

    def test_without_one_the_special_tokens_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError, match=r"no file beside .* says .* the special tokens are 3 <\|bos\|>, 4 <"):
            _ = load_tokenizer(_files(tmp_path)).end_of_document

    def test_without_one_all_else_can_be_done(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(_files(tmp_path))
        assert tokenizer.encode("abc").tolist() == [0, 1, 2]
        assert tokenizer.token_bytes.tolist() == [1, 1, 1, 0, 0]

    def test_one_that_the_tokenizer_lacks_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError, match="lacks the token '</s>'"):
            _ = load_tokenizer(_files(tmp_path, tokenizer_config={"eos_token": "</s>"})).end_of_document
        with pytest.raises(InvalidJobError, match="has the tokens 0 to 4"):
            _ = load_tokenizer(tmp_path, 5).end_of_document
        with pytest.raises(InvalidJobError, match="has the tokens 0 to 255"):
            load_tokenizer("bytes", 256)


class TestFiles:
    def test_one_that_is_missing_or_damaged_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidJobError, match=r"tokenizer.json cannot be read \(No such file"):
            load_tokenizer(tmp_path)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            _files(tmp_path, tokenizer_config={"eos_token": END})
            (tmp_path / name).write_text("{")
            with pytest.raises(InvalidJobError, match=f"{name} is n"):
                load_tokenizer(tmp_path)

    def test_the_digest_is_that_of_the_file(self, tokenizer_folder: Path, tmp_path: Path) -> None:
        other = json.loads((tokenizer_folder / "tokenizer.json").read_text())
        write_tokenizer(tmp_path, json.dumps(other))
        assert load_tokenizer(tmp_path).sha256 != load_tokenizer(tokenizer_folder).sha256
        assert load_tokenizer("bytes").sha256 == load_tokenizer("bytes", 10).sha256

    def test_a_missing_package_is_named(self, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        with pytest.raises(InvalidJobError, match=r"tokenizers is not installed.*pip install '\.\[data\]'"):
            load_tokenizer(tokenizer_folder)


class TestBitsPerByte:
    def test_of_bytes_they_are_the_loss_in_bits(self) -> None:
        losses = np.random.default_rng(1).exponential(size=1000)
        text = ByteTokenizer().token_bytes[np.arange(1, 201)].repeat(5)
        assert bits_per_byte(losses.sum(), int(text.sum())) == pytest.approx(losses.mean() / math.log(2), abs=1e-12)

    def test_a_model_that_knows_nothing_has_those_of_its_vocabulary(self, tokenizer: Tokenizer) -> None:
        text = (Path(__file__).read_text() + "漢🏖") * 3
        for each in (tokenizer, ByteTokenizer()):
            tokens = each.encode(text)
            found = bits_per_byte(len(tokens) * math.log(each.vocabulary), int(each.token_bytes[tokens].sum()))
            expected = math.log2(each.vocabulary) * len(tokens) / len(text.encode())
            assert found == pytest.approx(expected, abs=1e-12)


def test_a_file_is_read_as_its_folder_is(tokenizer_folder: Path) -> None:
    assert FileTokenizer(tokenizer_folder / "tokenizer.json").sha256 == load_tokenizer(tokenizer_folder).sha256
