"""Mistakes in a job file are reported with file, line and column."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.job_file import faults_of, read_job_file
from pseudoreal_trainer.cli.yaml_positions import UnreadableYaml, read_documents

from tests.support.jobs import BadJob, bad_jobs

GOOD = """\
apiVersion: pseudoreal.dev/v1alpha1
kind: PseudoRealJob
metadata: {name: llm}
spec:
  model: {layers: 8, hiddenSize: 64, attention: {heads: 4}, sequenceLength: 32, feedForward: {size: 128}}
  data: {path: corpus}
  optimizer:
    learningRate: "1e-3"
  phases:
  - name: pseudo
    sharing: {blocks: 2}
    until: {step: 10}
    batch: {sequences: 8, microBatches: 2}
  - name: real
    until: {step: 20}
    workers: 2
    batch: {sequences: 8, microBatches: 2}
"""
MISTAKES = {
    "a field that does not exist": ("    workers: 2", "    worker: 2", 16, 5, "worker"),
    "a field of metadata that does not exist": ("{name: llm}", "{name: llm, lables: {}}", 3, 23, "metadata.lables"),
    "a field beside the spec": ("kind: PseudoRealJob\n", "kind: PseudoRealJob\nspecs: {}\n", 1, 1, "specs"),
    "a value out of range": ("{step: 20}", "{step: 0}", 15, 13, "until.step"),
    "a field in a flow mapping": ("hiddenSize: 64", "hiddenSize: small", 5, 22, "hiddenSize"),
    "a field that is missing": ("  data: {path: corpus}", "  data: {pattern: x}", 6, 3, "data.path"),
    "a rule across fields": ("{blocks: 2}", "{blocks: 3}", 11, 15, "blocks"),
    "a rule on a phase by its name": ("{step: 20}", "{step: 5}", 15, 13, "phases[real]"),
    "ranks that do not fit": ("    workers: 2", "    workers: 9", 14, 5, "phases[real]"),
    "a number that kubectl reads as one": ('"1e-3"', "1e-3", 8, 5, "learningRate"),
    "a text in place of a number": ("    workers: 2", "    workers: '2'", 16, 5, "workers"),
    "a bool in place of a number": ("    workers: 2", "    workers: yes", 16, 5, "workers"),
    "a number in place of a label": ("{name: llm}", "{name: llm, labels: {team: 1}}", 3, 32, "put it in quotes"),
    "a label that is none": ("{name: llm}", "{name: llm, labels: {team: a b}}", 3, 32, "'a b' is not a valid label"),
    "the name": ("{name: llm}", "{name: a.b}", 3, 12, "metadata.name"),
    "the version": ("v1alpha1", "v1", 1, 1, "apiVersion"),
    "a key twice": ("  data: {path: corpus}", "  data: {path: corpus}\n  data: {path: b}", 7, 3, "second time"),
    "no YAML": ("  data: {path: corpus}", "  data: {path: corpus", 7, 12, "a flow mapping that begins in line 6"),
}


def validate(file: Path, text: str) -> Result:
    file.write_text(text)
    return CliRunner().invoke(main, ["validate", str(file)])


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_fault_has_line_and_column(mistake: str, tmp_path: Path) -> None:
    old, new, line, column, says = MISTAKES[mistake]
    assert GOOD.count(old) == 1
    result = validate(tmp_path / "job.yaml", GOOD.replace(old, new))
    first, *_ = result.stderr.splitlines()
    assert first.startswith(f"{tmp_path}/job.yaml:{line}:{column}: "), first
    assert says in first
    assert result.exit_code == 78


def test_a_valid_job_is_reported_as_valid(tmp_path: Path) -> None:
    result = validate(tmp_path / "job.yaml", GOOD)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/job.yaml: job llm is valid\n")


def test_null_in_place_of_a_field_means_its_default(tmp_path: Path) -> None:
    assert validate(tmp_path / "job.yaml", GOOD.replace("    workers: 2", "    workers: null")).exit_code == 0


def test_faults_of_all_jobs_come_in_file_order(tmp_path: Path) -> None:
    bad = GOOD.replace("{step: 20}", "{step: 0}").replace("layers: 8", "layers: -1")
    result = validate(tmp_path / "job.yaml", "\n---\n".join([bad, GOOD, bad]))
    places = [line.split(": ")[0].split("job.yaml:")[1] for line in result.stderr.splitlines()]
    assert places == ["5:11", "15:13", "43:11", "53:13"]


@pytest.mark.parametrize("text", ["", "kind: ConfigMap\n", "- 1\n", "3\n"])
def test_a_file_without_a_job_is_an_error(text: str, tmp_path: Path) -> None:
    result = validate(tmp_path / "job.yaml", text)
    assert (result.exit_code, result.stderr) == (78, f"{tmp_path}/job.yaml holds no object of kind PseudoRealJob\n")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["validate", str(tmp_path / "none.yaml")])
    assert result.exit_code == 78
    assert "none.yaml cannot be read" in result.stderr


def test_dash_reads_standard_input() -> None:
    result = CliRunner().invoke(main, ["validate", "-"], input=GOOD.replace("{step: 20}", "{step: 0}"))
    assert result.stderr.startswith("standard input:15:13: ")


@pytest.mark.parametrize("bad", bad_jobs(), ids=lambda bad: bad.name)
def test_each_fault_is_at_a_key_that_its_sentence_names(bad: BadJob, tmp_path: Path) -> None:
    """Existing keys of a fault's path are followed as far as possible; the position is always inside the job."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(bad.body, sort_keys=False))
    (job,) = read_job_file(file).jobs
    lines = file.read_text().splitlines()
    faults = faults_of(job)
    assert faults
    for fault in faults:
        key = lines[fault.line - 1][fault.column - 1 :].split(":")[0]
        named = fault.sentence.removeprefix('unknown field "').split(" ")[0].rstrip('":;')
        # The position of a list item is that of its first key.
        assert key in re.split(r"[][.]", named) or lines[fault.line - 1][: fault.column - 1].strip() == "-", fault


def test_numbers_dates_and_anchors_are_read_as_by_kubectl() -> None:
    (document,) = read_documents("a: &x {at: 2030-01-01, rate: 3e-4, on: 1_000}\nb: *x\n")
    expected: dict[str, Any] = {"at": "2030-01-01", "rate": 3e-4}
    assert {**document.body["b"], **expected} == document.body["a"]
    with pytest.raises(UnreadableYaml):
        read_documents("a: *nowhere")


def test_a_file_that_multiplies_itself_by_aliases_is_refused_at_once(tmp_path: Path) -> None:
    """Nine lists, each of nine aliases of the list before: 9^9 values in 300 bytes."""
    lines = ["a: &a [x]", *(f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in pairwise("abcdefghij"))]
    result = validate(tmp_path / "job.yaml", "\n".join(lines))
    assert result.exit_code == 78
    assert "more than 100,000 values" in result.output


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("hf://owner/name", "is not pinned"),
        ("hf://owner/name@main", "is not pinned"),
        ("hf://datasets/owner/name@" + "0" * 40, "is not pinned"),
        ("hf://owner", "no address on the hub"),
        ("hf://owner/name@" + "0" * 40, None),
        ("/weights", None),
        ("s3://bucket/weights", None),
    ],
)
def test_weights_on_the_hub_have_a_commit(tmp_path: Path, path: str, words: str | None) -> None:
    """Without a commit, two executions could start from different weights; the first pod would refuse the job."""
    start = f"  checkpoint: {{startFrom: {{type: HuggingFace, huggingFace: {{path: {path!r}}}}}}}\n"
    result = validate(tmp_path / "job.yaml", GOOD + start)
    assert result.exit_code == (0 if words is None else 78), result.output
    assert words is None or words in result.output
    assert words is None or "spec.checkpoint.startFrom.huggingFace.path" in result.output
