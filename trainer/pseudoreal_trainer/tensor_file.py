"""safetensors files that are written tensor after tensor, so that nobody ever holds all of them in memory.

The format: https://github.com/huggingface/safetensors, "Format". Reading is left to the library, which maps the file.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

Array = NDArray[Any]

_NAMES = {"float64": "F64", "float32": "F32"}


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
    """Use as a context manager; the file is complete when every tensor was written, in the order of the forms."""

    def __init__(self, path: Path, forms: Mapping[str, Form]) -> None:
        self._file = path.open("wb")
        self._digest, self._size = hashlib.sha256(), 0
        self._expected = iter(forms.items())
        self._put(_header(forms))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, name: str, array: Array) -> None:
        expected, form = next(self._expected)
        assert (name, array.shape, array.dtype.name) == (expected, form.shape, form.dtype), "as announced"
        self._put(np.ascontiguousarray(array).tobytes() if array.ndim == 0 else np.ascontiguousarray(array).data)

    def finish(self) -> tuple[str, int]:
        """SHA-256 and size of the file, once all is written."""
        assert next(self._expected, None) is None, "all that was announced is written"
        self._file.flush()
        return self._digest.hexdigest(), self._size

    def _put(self, content: Any) -> None:
        view = memoryview(content).cast("B")
        self._digest.update(view)
        self._file.write(view)
        self._size += len(view)


def _header(forms: Mapping[str, Form]) -> bytes:
    entries, end = {}, 0
    for name, form in forms.items():
        entries[name] = {
            "dtype": _NAMES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [end, end + form.size],
        }
        end += form.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class TensorFile(Mapping[str, Array]):
    """A safetensors file; a tensor is read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file = safe_open(path, framework="numpy")
        self._names = list(self._file.keys())

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        array: Array = self._file.get_tensor(name)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
