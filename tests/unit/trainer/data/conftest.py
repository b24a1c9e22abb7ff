from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer

ROOT = Path(__file__).parents[4]
MEGABYTE = 1 << 20


def repository_text(size: int) -> Iterator[str]:
    """So many characters of this repository's Python files, file by file."""
    for file in sorted(ROOT.glob("*/pseudoreal_*/**/*.py")):
        text = file.read_text()[:size]
        if not text and not size:
            return
        yield text
        size -= len(text)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 1,024 tokens, trained on 200 kB."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder, train_tokenizer(repository_text(200_000), 1024))
    return folder
