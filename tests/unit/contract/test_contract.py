"""An operator and a trainer of different releases understand each other, or one reports why not."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args

import jsonschema
import pytest
from pseudoreal_api.resolved.config import DelinkConfig, PhaseConfig, read_config
from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_api.wire.contract import (
    CONTRACT,
    ContractError,
    Since,
    marks,
    with_contract,
    without_contract,
)
from pseudoreal_api.wire.messages import TerminationMessage
from pseudoreal_api.wire.reports import PodReport
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from tests import golden, released

Json = dict[str, Any]
LATER = CONTRACT + 1


def written(folder: Path, config: Json) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


@pytest.fixture
def config() -> Json:
    """Return a configuration that the operator writes for the pods of a phase."""
    return next(released.configurations("one-gpu"))


def _is_in(said: Any, read: Any) -> bool:
    """Return whether everything in `said` is also in `read`, which may contain more."""
    if isinstance(said, dict):
        return all(key in read and _is_in(value, read[key]) for key, value in said.items())
    if isinstance(said, list):
        return len(said) == len(read) and all(map(_is_in, said, read))
    return bool(said == read)


@pytest.mark.parametrize(
    ("name", "model"),
    [("status", PseudoRealJobStatus), ("report", PodReport), ("termination-message", TerminationMessage)],
)
@pytest.mark.parametrize("release", released.releases())
def test_messages_of_earlier_releases_are_read_without_loss(release: str, name: str, model: type[BaseModel]) -> None:
    """Covers jobs started under an earlier operator, and pods with the image of an earlier release."""
    said = released.recorded(release, name)
    assert _is_in(said, model.model_validate(said).model_dump(mode="json", by_alias=True, exclude_none=True))


@pytest.mark.parametrize(
    ("release", "name"),
    [(release, name) for release in released.releases() for name in released.recorded(release, "configurations")],
)
def test_configurations_of_a_release_are_read(release: str, name: str, tmp_path: Path) -> None:
    """Covers pods created by an earlier operator with an image of this release."""
    for said in released.recorded(release, "configurations")[name]:
        read = read_config(written(tmp_path, said)).to_dict()
        assert _is_in({key: said[key] for key in said.keys() - {"contractVersion", "needs"}}, read)


@pytest.mark.parametrize("name", golden.names())
@pytest.mark.parametrize("release", released.releases())
def test_trainers_of_a_release_read_what_the_operator_writes(release: str, name: str) -> None:
    """Covers pods with the image of an earlier release; fields that a trainer must not ignore require a
    later contract."""
    reads = released.recorded(release, "reads")
    for config in released.configurations(name):
        if config["contractVersion"] <= reads["contract"]:
            jsonschema.validate(config, reads["schemas"][config["stage"]])


@pytest.mark.parametrize("name", golden.names())
def test_trainer_reads_every_configuration_of_this_release(name: str, tmp_path: Path) -> None:
    for config in released.configurations(name):
        assert with_contract(read_config(written(tmp_path, config))) == config


def test_fields_of_a_later_release_are_ignored(config: Json, tmp_path: Path) -> None:
    expected = read_config(written(tmp_path, config))
    config["model"]["later"] = {"a": 1}
    config["optimizer"]["clipping"]["later"] = 1
    config["homes"] = "later"
    assert read_config(written(tmp_path, config)) == expected


def test_trainer_refuses_a_needed_feature_of_a_later_contract_by_name(config: Json, tmp_path: Path) -> None:
    config |= {"contractVersion": LATER, "needs": {"optimizer.later": LATER, "known": CONTRACT}}
    with pytest.raises(ContractError) as caught:
        read_config(written(tmp_path, config))
    says = f"speaks contract {CONTRACT}, the operator asks for contract {LATER}, for optimizer.later; set"
    assert says in str(caught.value)
    assert "spec.pod.image" in str(caught.value)


def test_a_value_of_a_later_release_is_named(config: Json, tmp_path: Path) -> None:
    config["sharing"]["pattern"] = "Spiral"
    with pytest.raises(ContractError, match=r"cannot read sharing.pattern .* found 'Spiral'\); set spec.pod.image"):
        read_config(written(tmp_path, config))


class _Part(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)

    old: int = 1
    must_know: Annotated[int, Since(LATER)] = 0


class _Whole(_Part):
    part: _Part = _Part()


def test_only_what_binds_asks_for_a_contract() -> None:
    plain: Json = {"old": 5, "mustKnow": 0, "part": {"old": 1, "mustKnow": 0}}
    assert with_contract(_Whole(old=5)) == plain | {"contractVersion": 3, "needs": {}}
    asked = with_contract(_Whole(part=_Part(must_know=7)))
    assert (asked["contractVersion"], asked["needs"]) == (LATER, {"part.mustKnow": LATER})


@pytest.mark.parametrize(("url", "number"), [("s3://bucket", 3), ("gs://bucket", 4), ("az://container", 4)])
def test_object_storage_that_earlier_trainers_take_for_a_folder_asks_for_a_contract(url: str, number: int) -> None:
    class Kept(BaseModel):
        object_storage: Annotated[str | None, marks(PhaseConfig)["object_storage"]] = None

    assert with_contract(Kept())["contractVersion"] == 3
    assert with_contract(Kept(object_storage=url))["contractVersion"] == number


def test_the_contract_is_not_part_of_the_configuration() -> None:
    assert without_contract(json.dumps(with_contract(_Part())).encode()) == {"old": 1, "mustKnow": 0}


def _models(annotation: Any, inside: bool) -> Iterator[tuple[type[BaseModel], bool]]:
    """Yield the models of a configuration, and whether each is inside a list or map."""
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
