"""The JSON schema by which editors check job files."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from jsonschema import Draft7Validator
from pseudoreal_api.publish.editor import FILE_NAME, editor_schema, to_json
from pseudoreal_trainer.cli.command import main

from tests import golden
from tests.support.jobs import bad_jobs, example_jobs, good_job, minimal_job, other_good_jobs

Json = dict[str, Any]

REPOSITORY = Path(__file__).parents[3]
SCHEMA = REPOSITORY / "charts" / "pseudoreal" / "files" / FILE_NAME
EXAMPLES = sorted((REPOSITORY / "examples").rglob("*.yaml"))
MODELINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)\n(.*?)(?=^---$|\Z)", re.MULTILINE | re.DOTALL)

VALIDATOR = Draft7Validator(editor_schema())
GOOD = [*example_jobs(), good_job(), minimal_job(), *(good.body for good in other_good_jobs())]
GOOD += [golden.job(name) for name in golden.names()]


def faults(body: Json) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(body)]


def test_schema_is_valid_small_and_what_the_command_prints() -> None:
    Draft7Validator.check_schema(editor_schema())
    assert len(to_json()) < 150_000, "an editor reads it for each file"
    assert CliRunner().invoke(main, ["schema"]).output == SCHEMA.read_text()


@pytest.mark.parametrize("body", GOOD, ids=lambda body: body["metadata"]["name"])
def test_schema_accepts_good_jobs(body: Json) -> None:
    assert faults(body) == []


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"spec__optimizer__learningRate": 3e-4}, "$.spec.optimizer.learningRate"),
        ({"spec__model__hiddenWidth": 64}, "$.spec.model"),
        ({"spec__phases__0__workers": "two"}, "$.spec.phases[0].workers"),
        ({"spec__phases__0__workers": True}, "$.spec.phases[0].workers"),
        ({"spec__phases__0__parallelism__schedule": "layered"}, "$.spec.phases[0].parallelism.schedule"),
        ({"spec__pod": {"template": {"spec": {"nodeselector": {}}}}}, "$.spec.pod.template.spec"),
        ({"spec__phases__0__resources": {"limits": {"memory": "8 GB"}}}, "$.spec.phases[0].resources.limits.memory"),
        ({"spec__checkpoint": {"storage": {"volume": {"claim": "c"}}}}, "$.spec.checkpoint.storage.volume"),
        ({"apiVersion": "pseudoreal.dev/v1"}, "$.apiVersion"),
        ({"kind": "PseudorealJob"}, "$.kind"),
        ({"metadata": {"labels": {"a": "b"}}}, "$.metadata"),
        ({"metadata__labels": {"a": 1}}, "$.metadata.labels.a"),
        ({"spec": {}}, "$.spec"),
        ({"specs": {}}, "$"),
    ],
)
def test_schema_finds_what_is_wrong_in_a_single_field(changes: Json, path: str) -> None:
    assert path in {fault.partition(": ")[0] for fault in faults(good_job(**changes))}


def test_schema_refuses_only_jobs_that_the_api_server_refuses() -> None:
    """Of the bad jobs it finds those that are wrong without a rule across fields."""
    found = [bad.name for bad in bad_jobs() if faults(bad.body)]
    assert len(found) > 45
    assert "sharing that coarsens" not in found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_modelines_stand_in_the_document_of_the_job_and_lead_to_the_schema(path: Path) -> None:
    """An editor applies a modeline to the document in which it stands: a claim before the job is none of its."""
    text = path.read_text()
    found = MODELINE.findall(text)
    kinds = [document.get("kind") for document in yaml.safe_load_all(text)]
    assert len(found) == kinds.count("PseudoRealJob")
    for schema, document in found:
        assert (path.parent / schema).resolve() == SCHEMA
        assert faults(yaml.safe_load(document)) == []


def test_parts_that_repeat_are_written_once() -> None:
    schema = json.loads(to_json())
    names = {ref.rpartition("/")[2] for ref in re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(schema))}
    assert names == schema["definitions"].keys()
