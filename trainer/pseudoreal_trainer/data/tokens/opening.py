"""From the name of a format to the token files of a folder."""

from typing import Literal

from pseudoreal_trainer.data.tokens.arrays import numpy_files, raw_files
from pseudoreal_trainer.data.tokens.megatron import megatron_files
from pseudoreal_trainer.data.tokens.nanotron import nanotron_files
from pseudoreal_trainer.data.tokens.native import native_files
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

Format = Literal["Native", "Megatron", "Nanotron", "NumPy", "Raw"]
RawType = Literal["uint8", "uint16", "uint32", "int32", "int64"]


def token_files(kind: Format, folder: StoragePath, pattern: str = "", dtype: RawType = "uint16") -> TokenFiles:
    """Return the token files of a folder. `pattern`: the files of tokens, in the order of their names (Megatron's
    X.bin, nanotron's X.ds); native files are listed in their index. `dtype`: of raw files. Raises InvalidJobError if no
    file matches or a file is damaged."""
    match kind:
        case "Native":
            return native_files(folder)
        case "Megatron":
            return megatron_files(_matching(folder, pattern))
        case "Nanotron":
            return nanotron_files(_matching(folder, pattern))
        case "NumPy":
            return numpy_files(_matching(folder, pattern))
        case "Raw":
            return raw_files(_matching(folder, pattern), dtype)


def _matching(folder: StoragePath, pattern: str) -> list[StoragePath]:
    try:
        found = [*storage_of(folder).glob(pattern)]
    except (ValueError, NotImplementedError) as error:
        raise InvalidJobError(f"{pattern!r} is not a glob pattern below {folder}: {error}") from error
    if not found:
        raise InvalidJobError(f"{pattern!r} matches no file below {folder}; change the pattern, or put the files there")
    return found
