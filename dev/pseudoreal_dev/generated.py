"""Checks generated files for staleness: the CustomResourceDefinition, its policy, its schema for editors and its
reference, the charts' READMEs, the version, and the document of what has run where."""

from pseudoreal_api.publish import crd, editor, policy, reference

from pseudoreal_dev import tested
from pseudoreal_dev.demo.chart import CHART
from pseudoreal_dev.machine import paths, version
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress
from pseudoreal_dev.release import chart_readme

FOLDERS = (paths.REPOSITORY / "crds", CHART / "files")
"""Folders with the definition and the policy."""
REFERENCE = paths.REPOSITORY / "docs" / "manifest.md"
SCHEMA = CHART / "files" / editor.FILE_NAME


def check() -> None:
    """Raise DevError if a generated file is stale."""
    wanted = {REFERENCE: reference.to_markdown(), SCHEMA: editor.to_json()}
    for folder in FOLDERS:
        wanted |= {folder / crd.FILE_NAME: crd.to_yaml(), folder / policy.FILE_NAME: policy.to_yaml()}
    wanted[tested.DOCUMENT] = tested.to_markdown()
    wanted |= {chart / chart_readme.FILE_NAME: chart_readme.readme(chart) for chart in chart_readme.CHARTS}
    wanted |= dict(version.stamped())
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    if stale:
        names = ", ".join(str(path.relative_to(paths.REPOSITORY)) for path in stale)
        raise DevError(f"{names} are stale; run `make generate` and commit the result")
    progress.note("the generated files are up to date")
