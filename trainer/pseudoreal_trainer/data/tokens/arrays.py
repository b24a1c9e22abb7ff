"""Tokens in arrays: true `.npy` files of numpy, and raw files without any header, under any name.

The `.npy` files of OLMo and Dolma are raw: `numpy.memmap` wrote them, and `numpy.load` cannot read them (OLMo-core,
data/utils.py). Each reader rejects the other kind, with a message that names it.
"""

from io import BytesIO
from typing import Any

import numpy as np

from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles, damaged, read_bytes, size_of
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath

_MAGIC = b"\x93NUMPY"
_MOST_HEADER_BYTES = 10_000
_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def numpy_files(files: list[StoragePath]) -> TokenFiles:
    """Return true `.npy` files, each an integer array [tokens]. Raises InvalidJobError if a file is missing, damaged,
    or of another kind."""
    return TokenFiles(tuple(_numpy_run(path) for path in files), ())


def _numpy_run(path: StoragePath) -> Run:
    size = size_of(path)
    head = BytesIO(read_bytes(path, 0, min(size, _MOST_HEADER_BYTES)))
    if head.getvalue()[: len(_MAGIC)] != _MAGIC:
        raise InvalidJobError(
            f"{path} does not begin with {_MAGIC!r}, so numpy.save did not write it; if it holds bare tokens, as Dolma"
            " and OLMo write them, its format is Raw, and its dtype must be given"
        )
    shape, order, dtype = _header(path, head)
    if len(shape) != 1 or order or dtype.kind not in "ui":
        raise InvalidJobError(
            f"{path} holds an array of {dtype} of the shape {shape}; tokens are integers of the shape [tokens]: save"
            " them with numpy.save(path, tokens.ravel())"
        )
    run = Run(path, head.tell(), dtype, shape[0])
    if run.end != size:
        raise damaged(path, f"has {size:,} bytes, and by its header it has {run.end:,}")
    return run


def _header(path: StoragePath, head: BytesIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return the shape, whether the array has several axes in Fortran order, and the dtype. Leaves `head` at the first
    element."""
    try:
        version = np.lib.format.read_magic(head)
        if version not in _READERS:
            raise ValueError(f"version {version} of the format; 1.0 and 2.0 are read")
        shape, fortran, dtype = _READERS[version](head)
    except ValueError as error:
        raise damaged(path, f"has no header that numpy reads ({error})") from error
    return shape, fortran and len(shape) > 1, dtype


def raw_files(files: list[StoragePath], dtype: str) -> TokenFiles:
    """Return files of bare tokens, little-endian. `dtype`: uint8, uint16, uint32, int32 or int64; the files do not
    state it. Raises InvalidJobError if a file is missing, has a numpy header, or has no whole number of tokens."""
    return TokenFiles(tuple(_raw_run(path, np.dtype(dtype).newbyteorder("<")) for path in files), ())


def _raw_run(path: StoragePath, dtype: np.dtype[Any]) -> Run:
    size = size_of(path)
    if size >= len(_MAGIC) and read_bytes(path, 0, len(_MAGIC)) == _MAGIC:
        raise InvalidJobError(f"{path} has a header of numpy, which would be read as tokens: its format is NumPy")
    run = Run(path, 0, dtype, size // dtype.itemsize)
    if run.end != size:
        raise InvalidJobError(
            f"{path} has {size:,} bytes, which is no whole number of {dtype.name}: give the right dtype, or restore the"
            " file if it was cut"
        )
    return run
