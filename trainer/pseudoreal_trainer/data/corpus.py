"""The corpus as bytes: read, concatenated, split into a training and a validation part."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pseudoreal_api.model_spec import Data

from pseudoreal_trainer.errors import InvalidJobError

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Corpus:
    train: Bytes
    validation: Bytes

    @property
    def bytes(self) -> int:
        return len(self.train) + len(self.validation)


def load_corpus(data: Data, sequence: int) -> Corpus:
    """Every file that matches, in the order of their names. Raises InvalidJobError when there is too little text."""
    text = np.concatenate([np.fromfile(file, dtype=np.uint8) for file in corpus_files(data)])
    boundary = len(text) - round(len(text) * float(data.validation.fraction))
    corpus = Corpus(text[:boundary], text[boundary:])
    for part, name in ((corpus.train, "training"), (corpus.validation, "validation")):
        if len(part) <= sequence:
            raise InvalidJobError(
                f"data.path {data.path} with data.pattern {data.pattern} holds {len(text)} bytes, of which"
                f" data.validation.fraction {data.validation.fraction} leaves {len(part)} for {name}; at least"
                f" model.sequence + 1 = {sequence + 1} are needed: add text or lower model.sequence"
            )
    return corpus


def corpus_files(data: Data) -> list[Path]:
    """Raises InvalidJobError when the folder is missing or nothing in it matches."""
    folder = Path(data.path)
    if not folder.is_dir():
        raise InvalidJobError(
            f"data.path {data.path} is not a folder (looked for {folder.absolute()}); put the corpus there or change"
            " data.path"
        )
    try:
        found = [path for path in folder.glob(data.pattern) if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise InvalidJobError(f"data.pattern {data.pattern} is not a glob pattern below data.path: {error}") from error
    if not found:
        raise InvalidJobError(
            f"data.pattern {data.pattern} matches no file below data.path {data.path}; change the pattern or add files"
        )
    return sorted(found, key=lambda path: path.relative_to(folder).as_posix())
