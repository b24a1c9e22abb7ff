"""Short hash of the content of files: unchanged sources are not built twice."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def list_files(root: Path, patterns: Iterable[str]) -> list[Path]:
    """Return the files below `root` that match the glob patterns, sorted. A matching folder adds all files below it.

    Python's caches are excluded, because they change without a change of the source.
    """
    found: set[Path] = set()
    for pattern in patterns:
        for match in root.glob(pattern):
            found.update(match.rglob("*") if match.is_dir() else [match])
    return sorted(path for path in found if path.is_file() and not _is_python_cache(path))


def hash_files(root: Path, patterns: Iterable[str], facts: Iterable[str] = ()) -> str:
    """Return 16 hexadecimal digits: a hash of the paths, executable bits and bytes of the files, and of `facts`."""
    digest = hashlib.sha256()
    for fact in facts:
        _add(digest, fact.encode())
    for path in list_files(root, patterns):
        _add(digest, path.relative_to(root).as_posix().encode())
        _add(digest, b"x" if path.stat().st_mode & 0o100 else b"-")
        _add(digest, path.read_bytes())
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    # With length prefixes, different splits of the same bytes give different hashes.
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)


def _is_python_cache(path: Path) -> bool:
    return path.suffix == ".pyc" or "__pycache__" in path.parts or any(p.endswith(".egg-info") for p in path.parts)
