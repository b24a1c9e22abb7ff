"""Collects the licence texts of the installed Python packages.

The Dockerfile runs it as a program, `python licences.py FOLDER`, with nothing but Python's own library. Debian's
packages have theirs in /usr/share/doc/NAME/copyright.
"""

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePath
from typing import Any

INDEX = "python-packages.json"
_TEXT = re.compile(r"(licen[cs]e|copying|notice|authors|eula|copyright)[\w-]*(\.(txt|md|rst))?", re.IGNORECASE)


def collect(folder: Path, packages: Iterable[Distribution]) -> None:
    """Copy each package's texts to folder/NAME-VERSION, and write an index of all packages with what they declare."""
    index = []
    for package in sorted(packages, key=lambda package: package.name.lower()):
        copied = []
        for inside, file in _texts(package):
            target = folder / f"{package.name}-{package.version}" / inside
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
            copied.append(target.relative_to(folder).as_posix())
        index.append(
            {"name": package.name, "version": package.version, "licence": declared(package), "texts": sorted(copied)}
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_text(json.dumps(index, indent=1) + "\n")


def declared(package: Distribution) -> str:
    """Return the licence that the package's metadata names, or an empty string."""
    metadata: Any = package.metadata
    classifiers = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier") or () if line.startswith("License ::")
    ]
    stated = metadata.get("License-Expression") or ", ".join(classifiers) or metadata.get("License") or ""
    return str(stated).strip().partition("\n")[0]


def _texts(package: Distribution) -> Iterator[tuple[PurePath, Path]]:
    """Yield each licence text: its path in the metadata folder or else in the package, and the file."""
    for file in package.files or ():
        folder, *inside = file.parts
        is_metadata = folder.endswith(".dist-info") and bool(inside)
        if _TEXT.fullmatch(file.name) or (is_metadata and inside[0] == "licenses"):
            found = Path(str(package.locate_file(file)))
            if found.is_file():
                yield PurePath(*inside) if is_metadata else PurePath(*file.parts), found


if __name__ == "__main__":
    collect(Path(sys.argv[1]), distributions())
