"""`Job`: reading, writing and checking it, its plan, and metrics as rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pseudoreal import InvalidJob, Job, JobMetadata, PseudoRealJobSpec, Unreadable, read_metrics
from pseudoreal.metrics import rows_of_log
from pseudoreal_api.spec.check import check_job
from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.cli.yaml_scalars import Dumper

from tests.support.jobs import good_job, minimal_job, other_good_jobs
from tests.support.trainer_log import line

Json = dict[str, Any]
EXAMPLES = sorted(path for path in Path("examples").rglob("*.yaml") if "kind: PseudoRealJob" in path.read_text())
GOOD = [*other_good_jobs()]


def written(body: Json) -> str:
    """Return the job as a file for kubectl."""
    return yaml.dump(body, Dumper=Dumper, sort_keys=False)


def without_nulls(value: Any) -> Any:
    """Return JSON without nulls, which mean a default or nothing."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_a_job_is_written_as_it_was_read(case: Any) -> None:
    read = Job.from_yaml(written(case.body))
    again = Job.from_yaml(read.to_yaml())
    assert again.spec == read.spec == check_job(case.body).spec
    assert again.to_object() == read.to_object()
    read.validate()


@pytest.mark.parametrize("path", EXAMPLES, ids=str)
def test_an_example_keeps_exactly_its_fields(path: Path) -> None:
    """No default is added, which would be frozen into the job; only what the model's family decides is written out."""
    (body,) = [one for one in yaml.safe_load_all(path.read_text()) if one and one["kind"] == "PseudoRealJob"]
    given, kept = without_nulls(body), json.loads(json.dumps(Job.from_yaml(path).to_object()))
    if "family" in given["spec"]["model"]:
        own, written = given["spec"].pop("model"), kept["spec"].pop("model")
        assert _holds(written, own)
    assert kept == given


def _holds(whole: Any, part: Any) -> bool:
    """Return whether `whole` has all fields of `part`, with their values."""
    if not isinstance(part, dict):
        return bool(whole == part)
    return all(key in whole and _holds(whole[key], part[key]) for key in part)


def test_texts_that_look_like_numbers_stay_texts() -> None:
    """kubectl reads a plain 5e-3 as a number, and the API server refuses it."""
    text = Job.from_yaml("examples/quickstart.yaml").to_yaml()
    assert "learningRate: '5e-3'" in text


def test_a_fault_of_a_file_has_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(good_job(spec__phases__1__until={"step": 5}), sort_keys=False))
    with pytest.raises(InvalidJob, match=rf"^{path}:27:7: spec.phases\[real\].until.step 5 must be greater"):
        Job.from_yaml(path)
    with pytest.raises(InvalidJob, match=r"^text:27:7: "):
        Job.from_yaml(path.read_text())
    with pytest.raises(InvalidJob, match="cannot be read"):
        Job.from_yaml(tmp_path / "nothing.yaml")


def test_a_job_made_of_models_is_checked_by_the_same_rules() -> None:
    spec = PseudoRealJobSpec.model_validate(minimal_job()["spec"])
    job = Job(metadata=JobMetadata(name="llm"), spec=spec)
    job.validate()
    phases = [spec.phases[0], spec.phases[1].model_copy(update={"name": spec.phases[0].name})]
    with pytest.raises(InvalidJob, match="duplicate value pseudo"):
        job.model_copy(update={"spec": spec.model_copy(update={"phases": phases})}).validate()
    # The rule that phases cannot be resolved: it is beyond the schema.
    small = spec.phases[1].model_copy(update={"layers": 3})
    with pytest.raises(InvalidJob, match="layers"):
        job.model_copy(update={"spec": spec.model_copy(update={"phases": [spec.phases[0], small]})}).validate()


def test_a_job_of_another_release_is_named() -> None:
    body = good_job("llm", metadata__namespace="team", spec__newer={"field": 1})
    with pytest.raises(Unreadable, match=r"job llm in namespace team is not of this release: .*newer"):
        Job.from_object(body)


def test_a_stored_job_can_be_submitted_again() -> None:
    body = good_job("llm")
    body["metadata"] |= {"uid": "x", "generation": 3, "resourceVersion": "7"}
    assert Job.from_object(body | {"status": {"state": "Training"}}).to_object()["metadata"] == {"name": "llm"}


def test_plan_is_the_commands_plan() -> None:
    said = CliRunner().invoke(main, ["plan", "examples/quickstart.yaml", "--json"])
    reports = [report.model_dump(mode="json") for report in Job.from_yaml("examples/quickstart.yaml").plan()]
    assert reports == json.loads(said.stdout)["phases"]


def test_plan_with_an_unknown_profile_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "machine.yaml").write_text("name: machine\n")
    with pytest.raises(InvalidJob, match="machine"):
        Job.from_yaml("examples/quickstart.yaml").plan(hardware=tmp_path / "machine.yaml")


class TestRows:
    def test_rows_of_a_log_have_a_column_for_each_figure(self) -> None:
        rows = rows_of_log(["torch is loaded", line(1, 5.0), line(2, None, checkpoint=2)])
        assert [
            (row["step"], row["loss"], row["checkpoint.bytes" if row["step"] == 2 else "phase"]) for row in rows
        ] == [
            (1, 5.0, "real"),
            (2, None, 2**31),
        ]
        assert all(not isinstance(value, dict | list) for row in rows for value in row.values())

    def test_steps_trained_again_replace_the_earlier_ones(self) -> None:
        rows = rows_of_log([line(1, 5.0), line(2, 4.0), line(3, 3.0), line(2, 4.5)])
        assert [(row["step"], row["loss"]) for row in rows] == [(1, 5.0), (2, 4.5)]

    def test_rows_of_a_run_are_those_of_its_file(self, tmp_path: Path) -> None:
        reports = [ProgressReport.model_validate_json(line(step, 5.0 - step)) for step in (1, 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(f"{report.model_dump_json()}\n" for report in reports))
        assert [row["loss"] for row in read_metrics(tmp_path)] == [4.0, 3.0]

    def test_missing_and_foreign_metrics_are_errors(self, tmp_path: Path) -> None:
        with pytest.raises(Unreadable, match="no metrics"):
            read_metrics(tmp_path)
        (tmp_path / "metrics.jsonl").write_text('{"step": "one"}\n')
        with pytest.raises(Unreadable, match="are not of this release"):
            read_metrics(tmp_path)


def test_the_client_loads_neither_torch_nor_numpy() -> None:
    program = "import sys, pseudoreal\nprint(*({'torch', 'numpy', 'aiohttp', 'kopf', 'cel'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
