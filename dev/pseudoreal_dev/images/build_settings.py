"""Settings borrowed from the machine for a build: pip's configuration and the trusted certificates.

Both are mounted during a build, so neither becomes part of an image.
"""

import ast
import configparser
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from pseudoreal_dev.machine import paths, shell

CERTIFICATES = Path("/etc/ssl/certs")
BORROWED = Path("/run/build")


def mounts() -> Iterator[str]:
    """Write the pip.conf of the build, and yield buildah's volume arguments, SOURCE:TARGET:ro."""
    settings = parse(shell.output([sys.executable, "-m", "pip", "config", "list"]))
    borrowed = _local_paths(settings)
    file = paths.images() / "pip.conf"
    with file.open("w") as out:
        _rewritten(settings, borrowed).write(out)
    yield f"{file}:/etc/pip.conf:ro"
    if CERTIFICATES.is_dir():
        yield f"{CERTIFICATES}:{CERTIFICATES}:ro"
    for path, inside in borrowed.items():
        yield f"{path}:{inside}:ro"


def parse(listing: str) -> configparser.RawConfigParser:
    """Return pip's settings from `pip config list`; settings from the environment take precedence, as in pip."""
    lines = [line for line in listing.splitlines() if "=" in line]
    settings = configparser.RawConfigParser()
    settings.add_section("global")
    for line in sorted(lines, key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        section = "global" if section == ":env:" else section
        if not settings.has_section(section):
            settings.add_section(section)
        settings.set(section, key, ast.literal_eval(value))
    return settings


def _local_paths(settings: configparser.RawConfigParser) -> Mapping[str, str]:
    """Return path on this machine -> mount point inside a build, for the existing absolute paths in the settings.

    Paths below CERTIFICATES are left out, because this folder is mounted as a whole.
    """
    words = {word for section in settings.sections() for _, value in settings.items(section) for word in value.split()}
    found = sorted(word for word in words if _must_be_mounted(Path(word)))
    return {path: str(BORROWED / str(number)) for number, path in enumerate(found)}


def _must_be_mounted(path: Path) -> bool:
    return path.is_absolute() and path.exists() and not path.is_relative_to(CERTIFICATES)


def _rewritten(settings: configparser.RawConfigParser, borrowed: Mapping[str, str]) -> configparser.RawConfigParser:
    result = configparser.RawConfigParser()
    for section in settings.sections():
        result.add_section(section)
        for key, value in settings.items(section):
            result.set(section, key, " ".join(borrowed.get(word, word) for word in value.split()))
    return result
