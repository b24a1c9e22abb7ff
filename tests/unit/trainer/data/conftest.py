import random
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer

MEGABYTE = 1 << 20
_LETTERS = "etaoinshrdlucmfwygpbvk"


def drawn_texts(size: int) -> Iterator[str]:
    """Yield documents of `size` characters in all, identical in every run: lines of words drawn by Zipf's law, some of
    them indented, with empty lines between paragraphs."""
    chance = random.Random(11)
    words = ["".join(chance.choices(_LETTERS, k=chance.randint(2, 9))) for _ in range(3000)] + ["é", "漢字", "🏖", "42,"]
    weights = [*accumulate(1 / rank for rank in range(1, len(words) + 1))]
    while size > 0:
        lines = [
            "    " * chance.randint(0, 2)
            + " ".join(chance.choices(words, cum_weights=weights, k=chance.randint(2, 14)))
            for _ in range(chance.randint(3, 120))
        ]
        text = "".join(line + chance.choice(["\n", "\n", ".\n\n"]) for line in lines)[:size]
        yield text
        size -= len(text)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tokenizer with 1,024 tokens, trained on 200 kB."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_tokenizer(drawn_texts(200_000), 1024))
    return folder
