"""A short name for the content of a set of files, so that an unchanged input is never built twice."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def list_files(root: Path, patterns: Iterable[str]) -> list[Path]:
    """The files below `root` that match the glob patterns (a folder stands for all that it holds), sorted.

    Python's caches are left out: they change without the source changing.
    """
    found: set[Path] = set()
    for pattern in patterns:
        for match in root.glob(pattern):
            found.update(match.rglob("*") if match.is_dir() else [match])
    return sorted(path for path in found if path.is_file() and not _is_python_cache(path))


def hash_files(root: Path, patterns: Iterable[str], facts: Iterable[str] = ()) -> str:
    """16 hexadecimal digits over the paths, executable bits and bytes of the files, and over `facts`."""
    digest = hashlib.sha256()
    for fact in facts:
        _add(digest, fact.encode())
    for path in list_files(root, patterns):
        _add(digest, path.relative_to(root).as_posix().encode())
        _add(digest, b"x" if path.stat().st_mode & 0o100 else b"-")
        _add(digest, path.read_bytes())
    return digest.hexdigest()[:16]


def _add(digest: "hashlib._Hash", part: bytes) -> None:
    # The length in front keeps two different splits of the same bytes apart.
    digest.update(len(part).to_bytes(8, "big"))
    digest.update(part)


def _is_python_cache(path: Path) -> bool:
    return path.suffix == ".pyc" or "__pycache__" in path.parts or any(p.endswith(".egg-info") for p in path.parts)
