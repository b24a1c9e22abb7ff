"""Inputs under a URL: a file, or a folder or pattern that a service lists."""

from collections.abc import Callable
from pathlib import PurePath, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import structlog

from pseudoreal_trainer.data.prepare.reading.files import RemoteFile, described, info_of, patiently
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage import hub, services

MOST_FILES = 100_000
"""Maximum number of files under one URL."""
_MAGIC = "*?["

log = structlog.get_logger()


def is_remote(place: str) -> bool:
    return "://" in place


def remote_files(url: str, is_read: Callable[[PurePath], bool], kinds: str) -> list[tuple[str, RemoteFile]]:
    """Return the files under a URL, each with its name, in the order of the names: its path below the folder, or below
    the part of a pattern before the first wildcard. Files of a folder for which `is_read` is false, and those named
    .json, are left out. Raises InvalidJobError if there is none, and StorageUnavailable."""
    _check(url)
    if services.scheme_of(url) == "https":
        return [_named(_file(url), is_read, kinds)]
    if url.startswith(hub.SCHEME):
        url = _commit_of(url)
    url = url.rstrip("/")
    found = patiently(url, lambda: _listed(url))
    if found is None:
        return [_named(_file(url), is_read, kinds)]
    above = _fixed_part(url) if _has_magic(url) else f"{url}/"
    names = {name.removeprefix(above.partition("://")[2]): info for name, info in found.items()}
    # An uncompressed .json is mostly metadata; a .json file with text has to be named by the user.
    chosen = sorted(name for name in names if is_read(PurePosixPath(name)) and PurePosixPath(name).suffix != ".json")
    if not chosen:
        raise InvalidJobError(f"{url} holds no file to prepare ({len(found):,} of other kinds); these are: {kinds}")
    if len(chosen) > MOST_FILES:
        raise InvalidJobError(
            f"{url} holds {len(chosen):,} files to prepare, and {MOST_FILES:,} is the most; give patterns that match"
            " fewer, and prepare each into a folder of its own"
        )
    return [(name, described(f"{above}{name}", names[name])) for name in chosen]


def _check(url: str) -> None:
    scheme = services.scheme_of(url)
    if scheme not in services.SERVICES:
        known = ", ".join(f"{each}://" for each in services.SERVICES)
        raise InvalidJobError(f"inputs under {scheme}:// cannot be read; give a path, or a URL with {known}")
    if "@" in urlsplit(url).netloc:
        raise InvalidJobError(
            f"a URL of {scheme}:// with a user or password is not taken, as URLs appear in logs and records; set"
            " credentials in the environment"
        )
    if scheme == "https" and any(sign in urlsplit(url).path for sign in "*["):
        raise InvalidJobError(f"{services.without_secrets(url)} has a wildcard, and web servers do not list files")


def _commit_of(url: str) -> str:
    """Return the URL at the commit that its revision is now, so that all files are of one commit."""
    if not hub.is_dataset(url):
        raise InvalidJobError(f"{url} is no dataset; give hf://datasets/OWNER/NAME[@REVISION]/PATH")
    found = patiently(url, lambda: hub.pinned(url))
    if found != url:
        log.info("dataset_is_at_commit", given=url, read=found)
    return found


def _listed(url: str) -> dict[str, dict[str, Any]] | None:
    """Return fsspec's names and descriptions of the files that the pattern matches, or in the folder; None if there is
    a file with this name."""
    files = services.file_system(url)
    if _has_magic(url):
        found = files.glob(url, detail=True)
    elif _is_file(files, url):
        return None
    else:
        found = files.find(url, detail=True)
    described_files = {name: info for name, info in found.items() if info["type"] == "file"}
    if not described_files:
        raise InvalidJobError(f"{url} matches no file; check the name, and the pattern")
    return described_files


def _is_file(files: Any, url: str) -> bool:
    # Not `isfile`, which says no after any error: files would then be searched below a file.
    if "/" not in url.partition("://")[2]:
        return False  # to ask for a bucket may need more rights than to list it
    try:
        return bool(files.info(url)["type"] == "file")
    except FileNotFoundError:
        return False


def _has_magic(url: str) -> bool:
    return any(sign in url for sign in _MAGIC)


def _fixed_part(pattern: str) -> str:
    """Return the folder above all files that a pattern matches, with a slash at its end."""
    first = min(pattern.index(sign) for sign in _MAGIC if sign in pattern)
    return pattern[: pattern.rindex("/", 0, first) + 1]


def _file(url: str) -> RemoteFile:
    return patiently(services.without_secrets(url), lambda: described(url, info_of(url)))


def _named(file: RemoteFile, is_read: Callable[[PurePath], bool], kinds: str) -> tuple[str, RemoteFile]:
    if not is_read(file.name):
        raise InvalidJobError(f"{file} is of no kind that can be prepared from a URL; these are: {kinds}")
    return file.name.name, file
