"""safetensors files that are written and read in pieces, so that nobody ever holds one in memory.

The format: https://github.com/huggingface/safetensors, "Format".
"""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pseudoreal_trainer.checkpoint.manifest import FileDigest

Array = NDArray[Any]

_NAMES = {"float64": "F64", "float32": "F32"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_BYTES = 8
_FLUSHED_BYTES = 32 << 20
_MOST_HEADER_BYTES = 100_000_000
"""What the format allows."""


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """As numpy names it."""

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize


class TensorWriter:
    """Takes the bytes of all tensors in the order of the forms, in portions of any size."""

    def __init__(self, path: Path, forms: Mapping[str, Form], facts: Mapping[str, str] | None = None) -> None:
        """`facts`: the format's own metadata."""
        self.path, self._file = path, path.open("xb")
        self._digest, self._size = hashlib.sha256(), 0
        self._threads = ThreadPoolExecutor(2, "file")
        self._flushed: Future[None] | None = None
        self._unflushed = 0
        self._expected = sum(form.size for form in forms.values())
        header = _header(forms, facts)
        self._expected += len(header)
        self.append(header)

    def append(self, content: Any) -> None:
        """A buffer, which may be changed afterwards."""
        view = memoryview(content).cast("B")
        digested = self._threads.submit(self._digest.update, view)
        self._file.write(view)
        self._size += len(view)
        self._flush(len(view))
        digested.result()

    def _flush(self, size: int) -> None:
        """Sends what is written on to the disk meanwhile: at the end there is little left to wait for."""
        self._unflushed += size
        if self._unflushed >= _FLUSHED_BYTES and (self._flushed is None or self._flushed.done()):
            self._await_flush()
            self._file.flush()
            self._flushed = self._threads.submit(os.fdatasync, self._file.fileno())
            self._unflushed = 0

    def _await_flush(self) -> None:
        """Raises what it raised: the system says only once that a disk has failed."""
        if self._flushed is not None:
            self._flushed.result()

    def finish(self) -> FileDigest:
        """The file survives a crash of the machine once this returns."""
        assert self._size == self._expected, "all that was announced is written"
        self._await_flush()
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        return FileDigest(sha256=self._digest.hexdigest(), size=self._size)

    def close(self) -> None:
        self._threads.shutdown()
        self._file.close()


def _header(forms: Mapping[str, Form], facts: Mapping[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if facts is None else {"__metadata__": dict(facts)}
    end = 0
    for name, form in forms.items():
        entries[name] = {
            "dtype": _NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [end, end + form.size],
        }
        end += form.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


class TensorFile:
    """Reads ranges of flattened tensors. Raises ValueError or OSError when the file is not of this format."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"{path} is not a safetensors file: its header would have {length:,} bytes")
            self._entries: dict[str, Any] = json.loads(file.read(length))
        self._bytes = np.memmap(path, dtype=np.uint8, mode="r", offset=_LENGTH_BYTES + length)

    def read(self, name: str, begin: int, end: int) -> Array:
        """The elements begin..end-1, [end - begin]; a view of the file, which is read when it is used."""
        entry = self._entries[name]
        dtype, start = np.dtype(_DTYPES[entry["dtype"]]), entry["data_offsets"][0]
        return self._bytes[start + begin * dtype.itemsize : start + end * dtype.itemsize].view(dtype)
