"""Every section of the reports is written from the results that the programs write.

A case that has different names in a program and in its report is found here, and not after an hour of measuring.
"""

from pathlib import Path

import pytest
from pydantic import BaseModel

from benchmarks import checkpoints, depth, predictions, report, versions, versions_results
from benchmarks.cases import MODELS
from benchmarks.data.report import TITLE as DATA_TITLE
from benchmarks.data.results import DATA
from benchmarks.gpu.report import GPU
from benchmarks.gpu.report import TITLE as GPU_TITLE
from benchmarks.method import report as method_report
from benchmarks.method.experiments import EXPERIMENTS
from benchmarks.moe import report as moe_report
from benchmarks.operator.results import OPERATOR, Records
from benchmarks.results import TRAINER
from benchmarks.stacks.registry import STACKS
from tests.unit.benchmarks import fake_results

TITLES = [
    "## Step times beside torch and DeepSpeed",
    "## The engine beside an earlier one",
    "## Depth",
    "## Predicted step times",
    "## Checkpoints",
    DATA_TITLE,
    "## Operator",
    moe_report.TITLE,
    GPU_TITLE,
]


def _results() -> dict[Path, bytes]:
    """Return file of results -> its content."""
    whole: dict[Path, BaseModel] = {
        TRAINER: fake_results.runs(),
        versions_results.VERSIONS: fake_results.compared_versions(),
        checkpoints.CHECKPOINTS: fake_results.savings(),
        DATA: fake_results.ALL,
        OPERATOR: Records(records=[fake_results.operator_record(200)]),
        GPU: fake_results.on_a_gpu(),
    }
    lists = {
        depth.DEPTH: depth.Depths.dump_json(fake_results.depths()),
        predictions.PREDICTIONS: predictions.Predictions.dump_json(fake_results.predicted()),
    }
    lines = {moe_report.LIVES: "\n".join(life.model_dump_json() for life in fake_results.mixtures()).encode()}
    return {path: found.model_dump_json().encode() for path, found in whole.items()} | lists | lines


@pytest.fixture
def document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return docs/benchmarks.md as written in a folder with nothing but results."""
    monkeypatch.chdir(tmp_path)
    results = _results()
    assert results.keys() == {TRAINER, GPU, *report._FURTHER, *report._DATED}, "every reported file has fake results"
    for path, content in results.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    report.main()
    return report.REPORT.read_text()


def test_every_section_is_written_with_every_case(document: str) -> None:
    assert [line for line in document.splitlines() if line.startswith("## ")] == TITLES
    steps, compared, depths, predicted, saved, *_ = (_rows(section) for section in document.split("\n## ")[1:])
    tables = len(MODELS) + 1  # one model is also timed with recomputed blocks
    assert {stack: steps.count(stack) for stack in STACKS} == dict.fromkeys(STACKS, tables)
    assert compared[2:] == [case.label for case in versions.cases()]
    assert depths[2:] == [str(layers) for layers in depth.LAYERS]
    assert predicted[2:] == [each.label for ranks in (1, 2) for each in predictions.configurations(ranks)]
    assert saved[2:] == [*checkpoints.WAYS]


def _rows(section: str) -> list[str]:
    """Return the first cells of all table rows, including header and rule rows."""
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]


def test_mixtures_are_compared_with_the_first_of_their_table(document: str) -> None:
    lines = document.splitlines()
    assert "| dense | 2.020 (2.000 to 2.040) | +0.000 | 1.00× |" in lines
    assert "| top 2 | 1.820 (1.800 to 1.840) | -0.200 | 3.00× |" in lines
    # The mixture with two prototypes is the fourth.
    assert "| shared experts, then real | 1.520 (1.500 to 1.540) | -0.200 | 1.50× |" in lines


def test_checkpoints_compare_the_way_that_waits_with_a_copy(document: str) -> None:
    words = " ".join(document.split())
    assert "takes 4.00 s, `cp` and `sync` of the same files 1.00 s: 25% of its rate" in words
    assert "takes 2.00 s, `cat` to nowhere 1.00 s: 50% of its rate" in words


def test_the_report_on_the_method_has_every_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    method_report.write_report(fake_results.lives())
    text = method_report.REPORT.read_text()
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    expected = [*method_report._SECTIONS, "Correlations of neighbouring layers' gradients"]
    assert titles[-len(expected) :] == expected
    assert {experiment.name for experiment in EXPERIMENTS} <= {*_rows(text)}
    assert "\n| 10 | 0.25 | 0.50 | 0.75 |\n" in text
    assert {path.name for path in Path("docs/images").iterdir()} == {
        f"method-{name}.svg" for name in ("shares", "policies", "blocks", "rates", "offload")
    }
