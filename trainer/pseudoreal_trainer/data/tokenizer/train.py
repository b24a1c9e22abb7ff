"""Training of a new tokenizer: byte-level BPE (Sennrich et al. 2016; Radford et al. 2019), on a sample of text."""

import json
from collections.abc import Iterable
from pathlib import Path

from pseudoreal_trainer.data.tokenizer.tokenizer import TOKENIZER_FILE
from pseudoreal_trainer.errors import InvalidJobError, from_extra
from pseudoreal_trainer.storage.durable import write_atomically

BEGIN, END = "<|bos|>", "<|eos|>"
LEAST_VOCABULARY = 256 + 2

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern that splits text before bytes are merged, as for GPT-4 and Llama 3: a word includes the space before it,
numbers are split into groups of three digits."""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> str:
    """Return the content of a `tokenizer.json`. The same texts in the same order give the same bytes.

    Memory grows with the number of different words. The vocabulary is smaller than requested if fewer pairs of the
    texts occur twice. Raises InvalidJobError if `vocabulary` is too small for all bytes.
    """
    with from_extra("data"):
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    if vocabulary < LEAST_VOCABULARY:
        raise InvalidJobError(
            f"a vocabulary of {vocabulary} has no room for the 256 bytes and {BEGIN} and {END}: ask for"
            f" {LEAST_VOCABULARY} tokens at least"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer.to_str(pretty=True)


def write_tokenizer(folder: Path, tokenizer: str) -> None:
    """Write a folder that `load_tokenizer` and `transformers` can read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BEGIN, "eos_token": END}
    write_atomically(folder / TOKENIZER_FILE, tokenizer)
    write_atomically(folder / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")
