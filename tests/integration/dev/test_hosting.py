"""Mistakes in workflows that fit the schema: actionlint and shellcheck find them. Needs Go, which builds actionlint."""

import shutil
from pathlib import Path

import pytest
from pseudoreal_dev import hosting
from pseudoreal_dev.machine import paths

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("kind", "${{ matrix.node }}", "${{ matrix.image }}", 'property "image" is not defined'),
        ("kind", '--image "$NODE"', "--image $NODE", "SC2086"),
        ("ci", "programs: lint", "program: lint", 'input "program" is not defined'),
    ],
)
def test_a_mistake_in_a_workflow_is_found(name: str, old: str, new: str, says: str, tmp_path: Path) -> None:
    shutil.copytree(paths.REPOSITORY / ".github", tmp_path / ".github")
    (tmp_path / ".git").mkdir()  # where actionlint looks for a project's actions
    workflow = tmp_path / f".github/workflows/{name}.yml"
    assert old in workflow.read_text()
    workflow.write_text(workflow.read_text().replace(old, new))
    (said,) = hosting.mistakes(tmp_path)
    assert f"{name}.yml" in said
    assert says in said
