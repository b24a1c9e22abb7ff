"""The changelog's section of a release, and the step that cuts a release."""

import re
from datetime import date
from pathlib import Path

from packaging.version import InvalidVersion, Version

from pseudoreal_dev.machine import paths, version
from pseudoreal_dev.machine.errors import DevError

_UNRELEASED = "## Unreleased"
_PROJECT_LINE = re.compile(r'^version = ".*"$', re.MULTILINE)
_RELATIVE_LINK = re.compile(r"\]\((?!https?://)([^()\s]+)\)")


def notes(changelog: str, wanted: Version, files: str = "") -> str:
    """Return the section of a release, or the section Unreleased for a version under development.

    `files`: URL of the release's files. Relative links are made absolute with it, because they lead nowhere on the
    page of a release.
    """
    name = "Unreleased" if wanted.is_devrelease else str(wanted)
    found = re.search(rf"^## {re.escape(name)}\b.*\n(?P<text>(?:(?!## ).*\n)*)", changelog, re.MULTILINE)
    if found is None or not found["text"].strip():
        raise DevError(f"CHANGELOG.md has no section {name!r} with text, so the release would have no notes")
    text = _RELATIVE_LINK.sub(rf"]({files}/\1)", found["text"]) if files else found["text"]
    return f"# pseudoreal {version.semantic(wanted)}\n\n{text.strip()}\n"


def cut(wanted: str, day: date, repository: Path = paths.REPOSITORY) -> None:
    """Write the version of a release into all files, and its name and date over the changelog's section Unreleased."""
    new = parse(wanted)
    if new.is_devrelease:
        raise DevError(f"VERSION is {wanted}, a version under development; a release is cut as 0.4.0 or 0.4.0rc1")
    if new <= (old := version.read(repository)):
        raise DevError(f"VERSION is {wanted}, and pyproject.toml says {old} already; name a later version")
    changelog = (repository / "CHANGELOG.md").read_text()
    if changelog.count(f"{_UNRELEASED}\n") != 1:
        raise DevError(f"CHANGELOG.md has no heading {_UNRELEASED!r}, or several; write what is new below one")
    (repository / "CHANGELOG.md").write_text(changelog.replace(f"{_UNRELEASED}\n", f"## {new} ({day.isoformat()})\n"))
    project = repository / "pyproject.toml"
    project.write_text(_PROJECT_LINE.sub(f'version = "{new}"', project.read_text(), count=1))
    version.write(repository)


def parse(text: str) -> Version:
    """Return the version in `text`. Raises DevError unless charts and images can state it as well."""
    try:
        found = Version(text)
    except InvalidVersion:
        found = Version("0")
    if len(found.release) != 3 or found.is_postrelease or found.epoch or found.local:
        raise DevError(
            f"VERSION is {text!r}, which is no version of this project; write it as 0.4.0, 0.4.0rc1 or 0.4.0.dev0"
        )
    return found
