"""What the hosting platform would not understand is refused before it gets there."""

from pathlib import Path

import pytest
from pseudoreal_dev import hosting
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError

WORKFLOW = ".github/workflows/nightly.yml"
FORM = ".github/ISSUE_TEMPLATE/bug.yml"
DEFECTS = {
    WORKFLOW: ("runs-on: ", "run-on: "),
    ".github/actions/setup/action.yml": ("using: composite", "using: composed"),
    FORM: ("- type: markdown", "- type: prose"),
    ".github/ISSUE_TEMPLATE/config.yml": ("true", "perhaps"),
    ".github/dependabot.yml": ("version: 2", "version: 3"),
    "CITATION.cff": ("authors:", "writers:"),
}
"""File -> a text in it, and what to write instead so that its schema no longer fits."""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Copy of the files that are checked."""
    for patterns in hosting.SCHEMAS.values():
        for file in (file for pattern in patterns for file in paths.REPOSITORY.glob(pattern)):
            copy = tmp_path / file.relative_to(paths.REPOSITORY)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(file.read_text())
    return tmp_path


def change(repository: Path, name: str, old: str, new: str) -> None:
    text = (repository / name).read_text()
    assert old in text
    (repository / name).write_text(text.replace(old, new))


@pytest.mark.needs("check_jsonschema")
def test_all_files_that_do_not_fit_are_named_at_once(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # without Go, schemas are all that is left
    for name, (old, new) in DEFECTS.items():
        change(repository, name, old, new)
    with pytest.raises(DevError) as error:
        hosting.check(repository)
    assert all(str(repository / name) in str(error.value) for name in DEFECTS)
    assert str(repository / ".github/workflows/ci.yml") not in str(error.value)


def test_a_schema_without_a_file_is_a_mistake(repository: Path) -> None:
    (repository / "CITATION.cff").unlink()
    with pytest.raises(DevError, match=r"no file fits CITATION\.cff"):
        hosting.check(repository)
