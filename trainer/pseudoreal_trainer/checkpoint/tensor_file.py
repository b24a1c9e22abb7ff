"""safetensors files, written and read in pieces: no process holds a whole file in memory.

The format: https://github.com/huggingface/safetensors, "Format".
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from pseudoreal_trainer.checkpoint.manifest import FileDigest
from pseudoreal_trainer.checkpoint.precision import Array, empty, widen
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import Content, storage_of

_NAMES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000
"""Largest header that the format allows, in bytes."""


@dataclass(frozen=True)
class Form:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """Name of the dtype, as in torch."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


class TensorWriter:
    """Writer of one file. The bytes of all tensors are appended in the order of `forms`, in chunks of any size.

    SHA-256 is computed on a thread of its own while the chunk is written; `append` waits for both.
    """

    def __init__(self, path: StoragePath, forms: Mapping[str, Form], facts: Mapping[str, str] | None = None) -> None:
        """`facts`: the `__metadata__` entry of the format."""
        header = _header(forms, facts)
        self._expected = len(header) + sum(form.size for form in forms.values())
        self.path, self._file = path, storage_of(path).output(self._expected)
        self._digest, self._size = hashlib.sha256(), 0
        self._thread = ThreadPoolExecutor(1, "digest")
        self.append(header)

    def append(self, content: Any) -> None:
        """Append a buffer. The caller may change the buffer afterwards."""
        view = memoryview(content).cast("B")
        digested = self._thread.submit(self._digest.update, view)
        self._file.write(view)
        self._size += len(view)
        digested.result()

    def finish(self) -> FileDigest:
        """Finish the file and return its digest. The content then survives a crash of the machine (see
        `Output.finish`)."""
        assert self._size == self._expected, "all bytes of all tensors in the header were appended"
        self._file.finish()
        self.close()
        return FileDigest(sha256=self._digest.hexdigest(), size=self._size)

    def close(self) -> None:
        """Close the file. If it was not finished, it is incomplete on a file system and does not exist in object
        storage."""
        self._thread.shutdown()
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
    """Reader for ranges of flattened tensors. Raises ValueError or OSError if the file is not in this format."""

    def __init__(self, path: StoragePath) -> None:
        self.path = path
        self._content = storage_of(path).content()
        length = int.from_bytes(_bytes(self._content, 0, _LENGTH_BYTES), "little")
        if length > _MOST_HEADER_BYTES:
            raise ValueError(f"{path} is not a safetensors file: its header would have {length:,} bytes")
        try:
            self._entries: dict[str, Any] = json.loads(_bytes(self._content, _LENGTH_BYTES, length))
        except RecursionError as error:
            raise ValueError(f"{path} is not a safetensors file: its header is nested too deep") from error
        if not isinstance(self._entries, dict):
            raise ValueError(f"{path} is not a safetensors file: its header is no JSON object")
        self._begin = _LENGTH_BYTES + length

    @property
    def names(self) -> list[str]:
        return [name for name in self._entries if name != "__metadata__"]

    def form(self, name: str) -> Form:
        """Return shape and type of a tensor from the header. Raises ValueError if the type is not supported or the
        header is invalid."""
        entry = self._entries[name]
        try:
            begin, end = entry["data_offsets"]
            shape, dtype = tuple(entry["shape"]), str(entry["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self.path.name} has a header without sense, of {name}: {error!r}") from error
        # `type`, because True and False are instances of int.
        if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
            raise ValueError(
                f"{self.path.name} has a header without sense, of {name}: sizes and offsets must be whole numbers"
            )
        if dtype not in _DTYPES:
            raise ValueError(f"tensor {name} is {dtype}; the types that are read are {', '.join(_DTYPES)}")
        form = Form(shape, _DTYPES[dtype])
        if end - begin != form.size:
            raise ValueError(f"tensor {name} has {end - begin:,} bytes and the shape {[*shape]}")
        return form

    def end(self, name: str) -> int:
        """Return the file offset of the first byte after a tensor. The caller has checked the header with `form`."""
        end: int = self._entries[name]["data_offsets"][1]
        return self._begin + end

    def read_into(self, name: str, begin: int, out: Array) -> None:
        """Fill `out`, a contiguous array, with the elements from `begin` on."""
        if (found := self.form(name).dtype) != out.dtype.name:
            raise ValueError(f"{name} is {_NAMES[found]} in its file, not {out.dtype.name} as its manifest says")
        self.bytes_into(name, begin, out)

    def read_narrow(self, name: str, dtype: str, begin: int, count: int) -> Array:
        """Return `count` elements of a tensor of this type from `begin` on, in a type of numpy that represents each of
        them."""
        if self.form(name).dtype != dtype:
            raise ValueError(f"{name} is {self._entries[name]['dtype']} in its file, not {dtype} as its manifest says")
        numbers = empty(count, dtype)
        self.bytes_into(name, begin, numbers)
        return widen(numbers, dtype, "float32")

    def bytes_into(self, name: str, begin: int, out: Array) -> None:
        """Fill `out` with elements of the tensor `name`, from element `begin` on. The bytes are copied without
        conversion, so `out` may have any dtype with the tensor's element size, such as an integer type for bfloat16; it
        is contiguous. The caller has checked the header with `form`."""
        start = self._begin + self._entries[name]["data_offsets"][0]
        self._content.read_into(start + begin * out.itemsize, out.view(np.uint8))


def _bytes(content: Content, begin: int, count: int) -> bytes:
    found = np.empty(count, np.uint8)
    content.read_into(begin, found)
    return found.tobytes()
