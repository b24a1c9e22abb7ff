"""Locations of the repository and of the persistent cache outside it."""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
TOOLS = REPOSITORY / "dev" / "tools"


def cache() -> Path:
    """Return the cache folder: PSEUDOREAL_CACHE, else ~/.cache/pseudoreal."""
    chosen = os.environ.get("PSEUDOREAL_CACHE")
    return Path(chosen).resolve() if chosen else Path.home() / ".cache" / "pseudoreal"


def logs() -> Path:
    return cache() / "logs"


def binaries() -> Path:
    return cache() / "binaries"


def packages() -> Path:
    return cache() / "packages"


def images() -> Path:
    return cache() / "images"


def cluster() -> Path:
    return cache() / "cluster"
