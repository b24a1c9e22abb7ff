"""Mistakes in workflows that fit the schema: actionlint and shellcheck find them. Needs Go, which builds actionlint."""

import shutil
from pathlib import Path

import pytest
from pseudoreal_dev import hosting
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("${{ matrix.node }}", "${{ matrix.image }}", 'property "image" is not defined'),
        ('--image "$NODE"', "--image $NODE", "SC2086"),
        ("uses: ./.github/actions/setup", "uses: ./.github/actions/nothing", "nothing"),
    ],
)
def test_a_mistake_in_a_workflow_is_found(old: str, new: str, says: str, tmp_path: Path) -> None:
    shutil.copytree(paths.REPOSITORY / ".github", tmp_path / ".github")
    shutil.copy(paths.REPOSITORY / "CITATION.cff", tmp_path)
    (tmp_path / ".git").mkdir()  # where actionlint looks for a project's actions
    workflow = tmp_path / ".github/workflows/kind.yml"
    assert old in workflow.read_text()
    workflow.write_text(workflow.read_text().replace(old, new))
    with pytest.raises(DevError) as error:
        hosting.check(tmp_path)
    assert "kind.yml" in str(error.value)
    assert says in str(error.value)
