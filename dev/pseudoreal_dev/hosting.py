"""Checks files that the hosting platform reads: workflows, actions, issue forms, CITATION.cff."""

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress
from pseudoreal_dev.neighbours.building import Neighbour, built

SCHEMAS: Mapping[str, Sequence[str]] = {
    "vendor.github-workflows": [".github/workflows/*.yml"],
    "vendor.github-actions": [".github/actions/*/action.yml"],
    "vendor.github-issue-forms": [".github/ISSUE_TEMPLATE/[!c]*.yml"],
    "vendor.github-issue-config": [".github/ISSUE_TEMPLATE/config.yml"],
    "vendor.dependabot": [".github/dependabot.yml"],
    "vendor.citation-file-format": ["CITATION.cff"],
}
"""Schema that check-jsonschema ships -> files of the repository, as glob patterns."""
_ACTIONLINT = Neighbour(
    tool="actionlint",
    program="actionlint",
    module="github.com/rhysd/actionlint",
    package="github.com/rhysd/actionlint/cmd/actionlint",
    files={},
)


def check(repository: Path = paths.REPOSITORY) -> None:
    """Raise DevError, with all that is wrong, if the platform would not understand a file."""
    found = [*misfits(repository), *mistakes(repository)]
    if found:
        raise DevError("\n".join(found))
    progress.note("the files for the hosting platform are valid")


def misfits(repository: Path) -> list[str]:
    """Return what does not fit the platform's schemas."""
    found = []
    for schema, patterns in SCHEMAS.items():
        files = sorted(file for pattern in patterns for file in repository.glob(pattern))
        if not files:
            raise DevError(f"no file fits {' '.join(patterns)}; hosting.py names what the repository has")
        found += _said([sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *files])
    return found


def mistakes(repository: Path) -> list[str]:
    """Return what actionlint finds in the workflows, and shellcheck in their scripts."""
    if shutil.which("go") is None:
        progress.note("Go is missing, so actionlint is not built and the workflows are only held against their schema")
        return []
    files = sorted(repository.glob(".github/workflows/*.yml"))
    shellcheck = Path(sys.executable).parent / "shellcheck"
    return _said([built(_ACTIONLINT) / "actionlint", "-shellcheck", shellcheck, "-pyflakes", "", *files])


def _said(command: Sequence[str | Path]) -> list[str]:
    """Return what a checker says if it finds something."""
    done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return [] if done.returncode == 0 else [(done.stdout + done.stderr).strip()]
