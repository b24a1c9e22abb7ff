"""Objects, such as checkpoints and token files, in the storage of S3, Google or Azure, through fsspec."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from pseudoreal_trainer.storage import hub, services
from pseudoreal_trainer.storage.path import ObjectPath
from pseudoreal_trainer.storage.services import StorageUnavailable

_BLOCK_BYTES, _BLOCKS_AT_ONCE = 8 << 20, 8
"""Bytes of a block to read, and number of concurrent block reads."""
_WITHOUT_BUCKET = ("NoSuchBucket", "ContainerNotFound", "RepositoryNotFound", "RevisionNotFound")
"""Words of S3, Azure and the hub for a missing bucket, container, repository or revision."""
_PART_BYTES, _MOST_PARTS = 16 << 20, 10_000
"""Bytes of a part of a multipart upload, and the most parts that S3 allows."""

log = structlog.get_logger()


@dataclass(frozen=True)
class ObjectStorage:
    path: ObjectPath

    def exists(self) -> bool:
        # Not `exists`, which for the hub says no after any error.
        try:
            with _asking(self.path) as files:
                files.info(self.path.url)
        except FileNotFoundError:
            return False
        return True

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
        with _asking(self.path, only_bucket=True) as files:
            files.pipe_file(self.path.url, text.encode())

    def complete(self, text: str) -> None:
        """Write the last object of its folder. Raises FileExistsError if another execution has written it meanwhile."""
        self.create(text)

    def create(self, text: str) -> None:
        try:
            with _asking(self.path, only_bucket=True) as files:
                files.pipe_file(self.path.url, text.encode(), mode="create")
        except FileExistsError:
            # The response to this request may have been lost, and the request repeated.
            if self.read() != text.encode():
                raise

    def glob(self, pattern: str) -> Sequence[ObjectPath]:
        with _asking(self.path) as files:
            return [ObjectPath(f"{self.path.scheme}{key}") for key in sorted(files.glob(f"{self.path.url}/{pattern}"))]

    def folders(self) -> Sequence[ObjectPath]:
        # Not `find`, which lists every object below: two per rank of each checkpoint.
        with _asking(self.path) as files:
            try:
                found = files.ls(self.path.url, detail=True)
            except FileNotFoundError as error:
                if _is_without_bucket(error):
                    raise
                if self.path.scheme == "gs://":
                    # The error does not tell whether the bucket is there; an empty list does.
                    with _asking(self.path, only_bucket=True):
                        self._keys(files)
                return []
        names = {entry["name"].rstrip("/").rpartition("/")[2] for entry in found if entry["type"] == "directory"}
        return [self.path / name for name in sorted(names)]

    def make_folder(self) -> None:
        """Do nothing: object storage has no folders."""

    def remove_folder(self, first: str) -> None:
        with _asking(self.path) as files:
            keys = self._keys(files)
            last = (self.path / first).url.removeprefix(self.path.scheme)
            if last in keys:
                files.rm_file(last)
                keys.remove(last)
            if not keys:
                return
            try:
                files.rm(keys)
            except Exception as error:
                # Some servers do not support the request that deletes many objects.
                log.warning("objects_removed_one_by_one", folder=str(self.path), error=str(error))
            # The request does not report which objects it failed to remove.
            for key in self._keys(files):
                files.rm_file(key)

    def _keys(self, files: Any) -> list[str]:
        # Search the parent by prefix: for a folder without entries, `find` sends two more requests.
        found: list[str] = files.find(self.path.parent.url, prefix=f"{self.path.name}/")
        # adlfs drops the slash from a prefix, and then finds other folders, too.
        folder = f"{self.path.url.removeprefix(self.path.scheme)}/"
        return [key for key in found if key.startswith(folder)]


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
    """A multipart upload. The object appears when the upload is finished."""

    def __init__(self, path: ObjectPath, size: int) -> None:
        self._path, self._part, self._size = path, max(_PART_BYTES, ceil(size / _MOST_PARTS)), 0
        with _asking(path, only_bucket=True) as files:
            # A replaced execution may still be writing: the later writer must fail, not overwrite.
            self._file = files.open(path.url, "xb", block_size=self._part)
        self._finished = False

    def write(self, content: memoryview) -> None:
        """Append content. All parts but the last have equal size, as some servers require."""
        begin = 0
        with _asking(self._path, only_bucket=True):
            while begin < len(content):
                count = self._part - self._size % self._part
                written = self._file.write(content[begin : begin + count])
                begin, self._size = begin + written, self._size + written

    def finish(self) -> None:
        with _asking(self._path, only_bucket=True):
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
        # Otherwise garbage collection would close the file and try to upload the rest.
        self._file.closed = True


def _blocks(path: ObjectPath, begin: int, end: int) -> Iterator[bytes]:
    """Yield the bytes begin..end-1 block by block, with a few blocks in memory at a time."""
    for first in range(begin, end, _BLOCK_BYTES * _BLOCKS_AT_ONCE):
        starts = [*range(first, min(end, first + _BLOCK_BYTES * _BLOCKS_AT_ONCE), _BLOCK_BYTES)]
        ends = [min(end, start + _BLOCK_BYTES) for start in starts]
        with _asking(path) as files:
            yield from services.read_ranges(files, [path.url] * len(starts), starts, ends)


def read_ranges(ranges: Sequence[tuple[ObjectPath, int, int]]) -> list[bytes]:
    """Return the bytes begin..end-1 of each object, requested concurrently. Raises FileNotFoundError and
    StorageUnavailable."""
    if not ranges:
        return []
    urls, begins, ends = zip(*((path.url, begin, end) for path, begin, end in ranges), strict=True)
    with _asking(ranges[0][0]) as files:
        return services.read_ranges(files, urls, begins, ends)


def read_beginnings(paths: Sequence[ObjectPath], size: int) -> list[bytes | None]:
    """Return the first bytes of each object, at most `size`, requested concurrently; None if the object does not exist.
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
def _asking(path: ObjectPath, *, only_bucket: bool = False) -> Iterator[Any]:
    """Yield the fsspec file system of the path, and raise the errors of `Storage` in place of the file system's own.

    `only_bucket`: "not found" means the bucket, because the request writes an object or lists the bucket.
    """
    try:
        yield services.file_system(path.url)
    except FileExistsError as error:
        raise FileExistsError(f"{path} is there already: another execution has written it meanwhile") from error
    except FileNotFoundError as error:
        if only_bucket or _is_without_bucket(error):
            raise hub.unavailable(path.url, error) from error
        raise
    except StorageUnavailable:
        raise
    except Exception as error:  # file systems' errors have no common base class
        raise hub.unavailable(path.url, error) from error


def _is_without_bucket(error: BaseException) -> bool:
    """Return whether a FileNotFoundError says that there is no such bucket, or container, or repository of the hub."""
    chain: BaseException | None = error
    while chain is not None:
        if any(word in f"{type(chain).__name__} {chain}" for word in _WITHOUT_BUCKET):
            return True
        chain = chain.__cause__ or chain.__context__
    return False
