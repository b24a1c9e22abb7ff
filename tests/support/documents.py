"""Prose, code spans and fences of the repository's documents, and the folders from which paths in a document start."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    *("crds/pseudoreal_api", "operator/pseudoreal_operator", "operator/pseudoreal", "operator/pseudoreal_client"),
    *("trainer/pseudoreal_trainer", "dev/pseudoreal_dev"),
)
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_SPAN = re.compile(r"`([^`\n]+)`")


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def spans(path: Path) -> list[str]:
    """Return the texts between single backticks outside fences."""
    return _SPAN.findall(prose(path))


def folders(path: Path) -> list[Path]:
    """Return the folders from which a path in the document at `path` may start."""
    return [path.parent, ROOT, *(ROOT / package for package in PACKAGES)]
