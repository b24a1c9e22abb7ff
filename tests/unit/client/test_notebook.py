"""The notebook in examples: its job is the quickstart, and in deep runs it is executed from first to last cell."""

import json
from pathlib import Path
from typing import Any

import pytest
from pseudoreal import Job

NOTEBOOK = Path("examples/quickstart.ipynb").resolve()
CELLS: list[dict[str, Any]] = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs() -> None:
    """They would change with each run."""
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in CELLS if "outputs" in cell)


def test_its_job_is_the_quickstart_and_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """All cells before the training run."""
    monkeypatch.chdir(NOTEBOOK.parent)
    names: dict[str, Any] = {}
    for cell in CODE[:3]:
        exec(compile(cell, "cell", "exec"), names)
    job = names["job"]
    assert isinstance(job, Job)
    assert job.spec.model == Job.from_yaml("quickstart.yaml").spec.model


@pytest.mark.long
@pytest.mark.needs("nbclient")
def test_the_notebook_trains_draws_and_exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(NOTEBOOK.parent)}}).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.get("text", "") for output in shown)
    losses = [float(line.rpartition(" ")[2]) for line in said.splitlines() if "step " in line]
    assert "real: step 200, loss " in said
    assert losses[-1] < losses[0] - 0.5, said
    assert [output for output in shown if "image/png" in output.get("data", {})]
    (model,) = tmp_path.glob("*/model/model.safetensors")
    assert model.stat().st_size > 4 * 427_072  # float32
    assert any(model.name in str(output.get("data", {})) for output in shown)
