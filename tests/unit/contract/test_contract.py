"""An operator and a trainer of different releases understand each other, or one says why not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import jsonschema
import pytest
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig, read_config
from pseudoreal_api.wire.contract import CONTRACT, ContractError, Since, joined, marks, split
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from tests import golden

Json = dict[str, Any]

OLD: Json = json.loads((Path(__file__).parents[2] / "data" / "contract" / "0.2.0.json").read_text())
"""JSON schemas of the models with which release 0.2.0 reads a configuration: it refuses keys that it does not know."""


def written(folder: Path, known: Json, later: Json) -> Path:
    (folder / "config.json").write_text(json.dumps(known))
    (folder / "config-later.json").write_text(json.dumps(later))
    return folder / "config.json"


def configs(name: str) -> Iterator[tuple[Json, Json]]:
    """What the operator makes of a job: the file that every trainer reads, and the other one."""
    for manifest in golden.manifests(name):
        if manifest["kind"] == "Job":
            notes = manifest["spec"]["template"]["metadata"]["annotations"]
            files = [notes.get(f"pseudoreal.dev/{file}", "{}") for file in ("config.json", "config-later.json")]
            known, later = map(json.loads, files)
            yield known, later


@pytest.fixture
def files() -> tuple[Json, Json]:
    return next(configs("one-gpu"))


@pytest.mark.parametrize("name", golden.names())
def test_trainers_of_release_0_2_0_read_what_the_operator_writes(name: str) -> None:
    """A field that came later is marked `Since`, so that it is in the other file."""
    for known, _ in configs(name):
        schema = OLD["PhaseConfig" if known["role"] == "train" else "DelinkConfig"]
        jsonschema.validate(known, schema)


@pytest.mark.parametrize("name", golden.names())
def test_trainers_of_this_release_read_all_of_it(name: str, tmp_path: Path) -> None:
    for known, later in configs(name):
        config = read_config(written(tmp_path, known, later))
        assert split(config) == (known, later)


def test_what_came_later_reaches_the_trainer(files: tuple[Json, Json], tmp_path: Path) -> None:
    known, later = files
    config = read_config(written(tmp_path, known, later | {"collectiveSeconds": 77}))
    assert isinstance(config, PhaseConfig)
    assert config.collective_seconds == 77
    assert "collectiveSeconds" not in known


def test_fields_of_a_later_release_are_ignored(files: tuple[Json, Json], tmp_path: Path) -> None:
    known, later = files
    expected = read_config(written(tmp_path, known, later))
    known["model"]["later"] = {"a": 1}
    known["homes"] = "later"
    more = later | {"optimizer": {"later": 1}, "later": [1]}
    assert read_config(written(tmp_path, known, more)) == expected


def test_what_a_trainer_must_not_ignore_is_refused_by_name(files: tuple[Json, Json], tmp_path: Path) -> None:
    known, later = files
    known |= {"contractVersion": CONTRACT + 1, "needs": {"optimizer.later": CONTRACT + 1, "known": CONTRACT}}
    with pytest.raises(ContractError) as caught:
        read_config(written(tmp_path, known, later))
    says = f"speaks contract {CONTRACT}, the operator asks for contract {CONTRACT + 1}, for optimizer.later; set"
    assert says in str(caught.value)
    assert "spec.pod.image" in str(caught.value)


def test_a_value_of_a_later_release_is_named(files: tuple[Json, Json], tmp_path: Path) -> None:
    known, later = files
    known["sharing"]["pattern"] = "spiral"
    with pytest.raises(ContractError, match=r"cannot read sharing.pattern .* found 'spiral'\); set spec.pod.image"):
        read_config(written(tmp_path, known, later))


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    old: int = 1
    must_know: Annotated[int, Since(CONTRACT, binding=True)] = 0
    may_know: Annotated[int, Since(CONTRACT)] = 0


class _Whole(_Part):
    part: _Part = _Part()


def test_only_what_binds_asks_for_a_contract() -> None:
    known, later = split(_Whole(may_know=5, part=_Part(may_know=6)))
    assert known == {"old": 1, "part": {"old": 1}}
    assert later == {"mustKnow": 0, "mayKnow": 5, "part": {"mustKnow": 0, "mayKnow": 6}}
    known, later = split(_Whole(part=_Part(must_know=7)))
    assert (known["contractVersion"], known["needs"]) == (CONTRACT, {"part.mustKnow": CONTRACT})
    assert joined(json.dumps(known).encode(), json.dumps(later).encode())["part"]["mustKnow"] == 7


def _models(annotation: Any, inside: bool) -> Iterator[tuple[type[BaseModel], bool]]:
    """Models of a configuration, and whether they are items of something."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, inside
        for field in annotation.model_fields.values():
            yield from _models(field.annotation, inside)
    for argument in get_args(annotation):
        yield from _models(argument, inside or getattr(annotation, "__origin__", None) in (list, dict))


@pytest.mark.parametrize("root", [PhaseConfig, DelinkConfig])
def test_marks_are_where_they_can_be_read(root: type[BaseModel]) -> None:
    for model, inside in _models(root, False):
        for name, mark in marks(model).items():
            assert not inside, f"{model.__name__}.{name} is in the items of a list or a map"
            assert 1 < mark.contract <= CONTRACT
            assert not model.model_fields[name].is_required(), f"{model.__name__}.{name} needs a default"
