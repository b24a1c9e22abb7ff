"""What a release writes and reads, as tests/data/contract/RELEASE holds it for later ones.

`python -m tests.released RELEASE` records, before that release, how it writes the configurations of the golden jobs and
what it asks of those that it reads. status.json, report.json and termination-message.json are written by hand: every
field has a value there. After a release its folder stays as it is.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pseudoreal_api.names import CONFIG_FILE, file_annotation
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig
from pseudoreal_api.wire.contract import CONTRACT
from pydantic import BaseModel

from tests import golden

Json = dict[str, Any]

_FOLDER = Path(__file__).parent / "data" / "contract"


def releases() -> list[str]:
    return sorted(path.name for path in _FOLDER.iterdir())


def recorded(release: str, name: str) -> Any:
    """What stands in the file NAME.json of a release."""
    return json.loads((_FOLDER / release / f"{name}.json").read_text())


def configurations(job: str) -> Iterator[Json]:
    """What the operator writes now for the pods of a golden job, stage by stage."""
    for manifest in golden.manifests(job):
        if manifest["kind"] == "Job":
            yield json.loads(manifest["spec"]["template"]["metadata"]["annotations"][file_annotation(CONFIG_FILE)])


def _schemas() -> Json:
    models: dict[str, type[BaseModel]] = {"train": PhaseConfig, "delink": DelinkConfig}
    schemas: Json = {stage: _open(model.model_json_schema(by_alias=True)) for stage, model in models.items()}
    return {"contract": CONTRACT, "schemas": schemas}


def _open(schema: Any) -> Any:
    """The schema without what is no rule; a trainer ignores fields that it does not know."""
    if isinstance(schema, list):
        return [_open(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    left_out = ("additionalProperties", "description", "title", "x-kubernetes-validations")
    return {key: _open(value) for key, value in schema.items() if key not in left_out or isinstance(value, dict)}


def _write(release: str) -> None:
    folder = _FOLDER / release
    folder.mkdir(exist_ok=True)
    written = {job: list(configurations(job)) for job in golden.names()}
    for name, content in (("configurations", written), ("reads", _schemas())):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    _write(sys.argv[1])
