"""Opens the token files of a folder, in any of the formats, and checks that the documents end with the end-of-document
token of the training."""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.data.tokens import megatron, nanotron
from pseudoreal_trainer.data.tokens.arrays import numpy_files, raw_files
from pseudoreal_trainer.data.tokens.native import native_files
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles, read_bytes
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

Format = Literal["Native", "Megatron", "Nanotron", "NumPy", "Raw"]
RawType = Literal["uint8", "uint16", "uint32", "int32", "int64"]

_DOCUMENTS = 64
"""Number of documents checked, over all files of a source; at least one of each file."""
_PLACES, _PORTION = 16, 1 << 18
"""For files without a table of documents: number of places checked, and tokens read at each."""


def token_files(kind: Format, folder: StoragePath, pattern: str = "", dtype: RawType = "uint16") -> TokenFiles:
    """Return the token files of a folder. `pattern`: the files of tokens, in the order of their names (Megatron's
    X.bin, nanotron's X.ds); native files are listed in their index. `dtype`: dtype of raw files. Raises InvalidJobError
    if no file matches or a file is damaged."""
    match kind:
        case "Native":
            return native_files(folder)
        case "Megatron":
            return megatron.megatron_files(_find(folder, pattern))
        case "Nanotron":
            return nanotron.nanotron_files(_find(folder, pattern))
        case "NumPy":
            return numpy_files(_find(folder, pattern))
        case "Raw":
            return raw_files(_find(folder, pattern), dtype)


def _find(folder: StoragePath, pattern: str) -> list[StoragePath]:
    try:
        found = [*storage_of(folder).glob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise InvalidJobError(f"{pattern!r} is not a glob pattern below {folder}: {error}") from error
    if not found:
        raise InvalidJobError(f"{pattern!r} matches no file below {folder}; change the pattern, or put the files there")
    return found


def check_ends(kind: Format, files: TokenFiles, end: int) -> None:
    """Check that a few documents end with the token `end`. Raises InvalidJobError if a document does not. For NumPy
    and raw files, which have no table of documents, raises if `end` is at none of the checked places. Native files are
    not checked, because they record their end token; Nanotron files are not checked if they have no index."""
    most = max(1, _DOCUMENTS // max(1, len(files.runs)))
    match kind:
        case "Native":
            return
        case "Megatron":
            for run in files.runs:
                index = megatron.read_index(megatron.index_path(run.file))
                lacking = megatron.documents_without_end(index, run.file, end, most)
                _refuse(run, lacking, min(most, index.documents), end)
        case "Nanotron":
            for run in files.runs:
                ends = nanotron.some_ends(run.file, most)
                _refuse(run, sum(_token(run, each - 1) != end for each in ends if each), len(ends), end)
        case "NumPy" | "Raw":
            if not any((tokens == end).any() for tokens in _portions(files)):
                raise InvalidJobError(
                    f"the token {end}, which should end documents, is at none of {_PLACES} places of"
                    f" {files.runs[0].file} and the files beside it; {_REMEDY}"
                )


_REMEDY = (
    "name the token that ends them by spec.data.documents.endToken, make the files again with it (Megatron-LM's"
    " preprocess_data.py needs --append-eod), or set spec.data.documents.masking to None"
)


def _refuse(run: Run, lacking: int, looked_at: int, end: int) -> None:
    if lacking:
        raise InvalidJobError(
            f"{lacking} of {looked_at} documents of {run.file} that were looked at do not end with the token {end};"
            f" {_REMEDY}"
        )


def _portions(files: TokenFiles) -> Iterator[NDArray[Any]]:
    """Yield the tokens at places spread evenly over the files."""
    ends = np.cumsum([run.count for run in files.runs])
    for place in range(_PLACES):
        token = place * files.tokens // _PLACES
        number = int(np.searchsorted(ends, token, side="right"))
        run = files.runs[number]
        first = token - int(ends[number]) + run.count
        yield _tokens(run, first, min(run.count, first + _PORTION))


def _token(run: Run, number: int) -> int:
    return int(_tokens(run, number, number + 1)[0])


def _tokens(run: Run, first: int, end: int) -> NDArray[Any]:
    """Return the tokens first..end-1 of a run."""
    width = run.dtype.itemsize
    return np.frombuffer(read_bytes(run.file, run.begin + first * width, (end - first) * width), run.dtype)
