"""The identity of a corpus of token files, stored in checkpoints. File names and times are not part of it."""

import hashlib
from collections.abc import Iterator, Mapping

from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.data.tokens.runs import TokenFiles, read_bytes, size_of
from pseudoreal_trainer.storage.path import StoragePath

_END_BYTES = 1 << 20
"""Number of bytes at each end of a file that identify a file without a digest."""
_PORTION = 16 << 20


def token_identity(files: TokenFiles) -> CorpusIdentity:
    """Return the identity of token files.

    Native files are identified by the digests computed by their writer, without reading the tokens. Other formats are
    identified by the size and the first and last MiB of each token file, and by all bytes of their indices. In these
    formats, a change in the middle of a file of the same size goes unnoticed; `method` records the difference.
    """
    digest = hashlib.sha256()
    for part in _digests(files.sha256) if files.sha256 is not None else _ends(files):
        digest.update(part)
    return CorpusIdentity(
        files=len(files.runs),
        size=sum(run.end for run in files.runs),
        sha256=digest.hexdigest(),
        method="Ends" if files.sha256 is None else "Digests",
    )


def joined_identity(sources: Mapping[str, CorpusIdentity]) -> CorpusIdentity:
    """Return the identity of a corpus of several sources, by name."""
    lines = "".join(f"{name} {sources[name].sha256}\n" for name in sorted(sources))
    return CorpusIdentity(
        files=sum(source.files for source in sources.values()),
        size=sum(source.size for source in sources.values()),
        sha256=hashlib.sha256(lines.encode()).hexdigest(),
        method="Sources",
        sources=dict(sources),
    )


def _digests(sha256: tuple[str, ...]) -> Iterator[bytes]:
    for each in sha256:
        yield f"{each}\n".encode()


def _ends(files: TokenFiles) -> Iterator[bytes]:
    for run in files.runs:
        first = min(run.end, _END_BYTES)
        last = min(run.end - first, _END_BYTES)
        yield f"{run.end}\n".encode()
        yield read_bytes(run.file, 0, first)
        yield read_bytes(run.file, run.end - last, last)
    for index in files.indices:
        size = size_of(index)
        yield f"{size}\n".encode()
        yield from _all(index, size)


def _all(path: StoragePath, size: int) -> Iterator[bytes]:
    for begin in range(0, size, _PORTION):
        yield read_bytes(path, begin, min(_PORTION, size - begin))
