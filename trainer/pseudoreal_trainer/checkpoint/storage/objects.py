"""Checkpoints in object storage that speaks S3's language, through fsspec and s3fs."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from pseudoreal_trainer.checkpoint.storage.path import SCHEME, ObjectPath
from pseudoreal_trainer.errors import TrainingError

_BLOCK_BYTES, _BLOCKS_AT_ONCE = 8 << 20, 8
"""Bytes of a block that is read, and number of blocks at a time."""
_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
"""Bytes of a part that is written, and the number of parts that S3 allows."""

log = structlog.get_logger()


class StorageUnavailable(TrainingError):
    """Object storage that cannot be reached, or refuses. What it holds is then unknown."""


@dataclass(frozen=True)
class ObjectStorage:
    path: ObjectPath

    def exists(self) -> bool:
        with _asking(self.path) as files:
            return bool(files.exists(self.path.url))

    def read(self) -> bytes:
        with _asking(self.path) as files:
            found: bytes = files.cat_file(self.path.url)
            return found

    def size(self) -> int:
        with _asking(self.path) as files:
            return int(files.info(self.path.url)["size"])

    def sha256(self) -> str:
        digest = hashlib.sha256()
        for block in _blocks(self.path, 0, self.size()):
            digest.update(block)
        return digest.hexdigest()

    def content(self) -> "ObjectContent":
        return ObjectContent(self.path)

    def output(self, size: int) -> "ObjectOutput":
        return ObjectOutput(self.path, size)

    def replace(self, text: str) -> None:
        with _asking(self.path) as files:
            files.pipe_file(self.path.url, text.encode())

    def complete(self, text: str) -> None:
        """Writes the last object of its folder. Raises FileExistsError when another execution has done so meanwhile."""
        self.create(text)

    def create(self, text: str) -> None:
        try:
            with _asking(self.path) as files:
                files.pipe_file(self.path.url, text.encode(), mode="create")
        except FileExistsError:
            # The answer to our own request may be lost, and then it was sent again.
            if self.read() != text.encode():
                raise

    def glob(self, pattern: str) -> Sequence[ObjectPath]:
        with _asking(self.path) as files:
            return [ObjectPath(f"{SCHEME}{key}") for key in sorted(files.glob(f"{self.path.url}/{pattern}"))]

    def folders(self) -> Sequence[ObjectPath]:
        # Not `find`, which lists every object below: two for each rank of each checkpoint.
        with _asking(self.path) as files:
            try:
                found = files.ls(self.path.url, detail=True)
            except FileNotFoundError as error:
                if _code(error) == "NoSuchBucket":
                    raise
                return []
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"}
        return [self.path / name for name in sorted(names)]

    def make_folder(self) -> None:
        """Does nothing: object storage has no folders."""

    def remove_folder(self, first: str) -> None:
        with _asking(self.path) as files:
            keys = self._keys(files)
            last = (self.path / first).url.removeprefix(SCHEME)
            if last in keys:
                files.rm_file(last)
                keys.remove(last)
            if not keys:
                return
            try:
                files.rm(keys)
            except Exception as error:
                # Some servers know no request for many objects.
                log.warning("objects_removed_one_by_one", folder=str(self.path), error=str(error))
            # Such a request does not tell which objects it could not remove.
            for key in self._keys(files):
                files.rm_file(key)

    def _keys(self, files: Any) -> list[str]:
        # By a prefix, as s3fs looks two times more where it finds nothing in a folder.
        found: list[str] = files.find(self.path.parent.url, prefix=f"{self.path.name}/")
        return found


class ObjectContent:
    def __init__(self, path: ObjectPath) -> None:
        self._path = path

    def read_into(self, begin: int, out: NDArray[np.uint8]) -> None:
        filled = 0
        for block in _blocks(self._path, begin, begin + len(out)):
            out[filled : filled + len(block)] = np.frombuffer(block, np.uint8)
            filled += len(block)
        if filled != len(out):
            raise ValueError(f"{self._path} ends before byte {begin + len(out):,}")


class ObjectOutput:
    """An object that is sent in parts while it is written; it appears when it is finished."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._part, self._size = path, max(_PART_BYTES, ceil(size / _MOST_PARTS)), 0
        with _asking(path) as files:
            # An execution that was replaced may still be writing: who comes last must not replace what is there.
            self._file = files.open(path.url, "xb", block_size=self._part)
        self._finished = False

    def write(self, content: memoryview) -> None:
        """Takes content, which is sent in equal parts, as some servers want them."""
        begin = 0
        with _asking(self._path):
            while begin < len(content):
                count = self._part - self._size % self._part
                written = self._file.write(content[begin : begin + count])
                begin, self._size = begin + written, self._size + written

    def finish(self) -> None:
        with _asking(self._path):
            self._file.close()
        self._finished = True

    def close(self) -> None:
        if not self._finished:
            self._give_up()

    def _give_up(self) -> None:
        try:
            with _asking(self._path):
                self._file.discard()
        except (OSError, StorageUnavailable) as error:
            log.warning("upload_not_aborted", file=str(self._path), error=str(error))
        # Otherwise it is closed when it is collected, which sends what is left, or fails to.
        self._file.closed = True


def _blocks(path: ObjectPath, begin: int, end: int) -> Iterator[bytes]:
    """The bytes begin..end-1 block by block, some blocks of them in memory at a time."""
    for first in range(begin, end, _BLOCK_BYTES * _BLOCKS_AT_ONCE):
        starts = [*range(first, min(end, first + _BLOCK_BYTES * _BLOCKS_AT_ONCE), _BLOCK_BYTES)]
        ends = [min(end, start + _BLOCK_BYTES) for start in starts]
        with _asking(path) as files:
            yield from files.cat_ranges([path.url] * len(starts), starts, ends, on_error="raise")


def read_ranges(ranges: Sequence[tuple[ObjectPath, int, int]]) -> list[bytes]:
    """The bytes begin..end-1 of each object, all requested at the same time. Raises FileNotFoundError and
    StorageUnavailable."""
    if not ranges:
        return []
    urls, begins, ends = zip(*((path.url, begin, end) for path, begin, end in ranges), strict=True)
    with _asking(ranges[0][0]) as files:
        return list(files.cat_ranges([*urls], [*begins], [*ends], on_error="raise"))


def read_beginnings(paths: Sequence[ObjectPath], size: int) -> list[bytes | None]:
    """The first bytes of each object, at most `size`, all requested at the same time; None where there is no object.
    Raises StorageUnavailable."""
    if not paths:
        return []
    urls = [path.url for path in paths]
    with _asking(paths[0]) as files:
        found = files.cat_ranges(urls, [0] * len(urls), [size] * len(urls), on_error="return")
    return [_beginning(path, each) for path, each in zip(paths, found, strict=True)]


def _beginning(path: ObjectPath, found: bytes | Exception) -> bytes | None:
    if isinstance(found, bytes):
        return found
    try:
        with _asking(path):
            raise found
    except FileNotFoundError:
        return None


@contextmanager
def _asking(path: ObjectPath) -> Iterator[Any]:
    """A context with the file system of fsspec. Its errors have no base in common; here they become those of
    `Storage`."""
    try:
        yield _file_system()
    except FileExistsError as error:
        raise FileExistsError(f"{path} is there already: another execution has written it meanwhile") from error
    except FileNotFoundError as error:
        if _code(error) == "NoSuchBucket":
            raise _unavailable(path, error) from error
        raise
    except ImportError as error:
        raise StorageUnavailable(f"{path} needs the packages of pseudoreal[s3], which are not installed") from error
    except Exception as error:
        raise _unavailable(path, error) from error


def _file_system() -> Any:
    import fsspec

    # Other ranks and executions write meanwhile: what was listed once is not true for long.
    return fsspec.filesystem("s3", use_listings_cache=False)


def _unavailable(path: ObjectPath, error: Exception) -> StorageUnavailable:
    return StorageUnavailable(
        f"object storage does not give access to {path}: {type(error).__name__}: {error}; check the bucket, and"
        " AWS_ENDPOINT_URL and the credentials in the environment"
    )


def _code(error: BaseException) -> str | None:
    """S3's code of an error (https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html); None for another
    error."""
    response: dict[str, Any] = getattr(error.__cause__, "response", {})
    found: str | None = response.get("Error", {}).get("Code")
    return found
