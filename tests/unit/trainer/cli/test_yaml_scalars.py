"""Scalars of YAML as kubectl reads them; tests/integration/test_job_files.py compares them with kubectl."""

import math
from typing import Any

import pytest
import yaml
from pseudoreal_trainer.cli.yaml_positions import UnreadableYaml, read_documents
from pseudoreal_trainer.cli.yaml_scalars import Dumper, scalar

VALUES: dict[str, Any] = {
    "3e-4": 3e-4,
    "1e1": 10,
    "1.0": 1,
    "0o17": 15,
    "017": 15,
    "0x1F": 31,
    "-0b11": -3,
    "08": 8,
    "1_000": 1000,
    "1_0.5": 10.5,
    ".5": 0.5,
    ".5_0": ".5_0",
    "12:30": "12:30",
    "2030-01-01": "2030-01-01",
    "_1": "_1",
    "+": "+",
    "0o": "0o",
    "1e400": "1e400",
    "1e-400": 0,
    "9223372036854775807": 2**63 - 1,
    "9223372036854775808": float(2**63),
    "1e21": 1e21,
    "y": True,
    "Off": False,
    "tRUE": "tRUE",
    "": None,
    "~": None,
    "=": "=",
}


@pytest.mark.parametrize("text", VALUES)
def test_plain_scalar_has_the_value_that_kubectl_finds(text: str) -> None:
    assert (type(scalar(text)), scalar(text)) == (type(VALUES[text]), VALUES[text])


def read(text: str) -> Any:
    (document,) = read_documents(text)
    return document.body


def test_keys_are_texts_and_unknown_tags_say_nothing() -> None:
    text = "{1: a, yes: b, 1.5: c, =: <<, t: !x {a: !y [!z 1]}, s: !!set {a}, b: !!binary YQ==, d: 2030-01-01}"
    assert read(text) == {
        "1": "a",
        "true": "b",
        "1.5": "c",
        "=": "<<",
        "t": {"a": ["1"]},
        "s": {"a": None},
        "b": "a",
        "d": "2030-01-01",
    }


def test_merged_keys_give_way_to_own_ones() -> None:
    assert read("a: &a {x: 1, z: 2}\nb: {<<: *a, x: 3}\n")["b"] == {"x": 3, "z": 2}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("%YAML 1.1\n---\na: b\n", "1: this is no YAML: a line that begins with % is a directive"),
        ("a: .inf\n", "1: this is no YAML: JSON has no infinity"),
        ("a: b\n~: c\n", "2: this is no YAML: a key must be a text"),
        ("a: !!int x\n", "1: this is no YAML: the value is no int"),
        ("a: !!binary '%'\n", "1: this is no YAML"),
        ("a: !!timestamp 2030-01-01\n", "1: this is no YAML: kubectl makes a time"),
        ("a: !!python/object/apply:os.system [ls]\n", ""),
    ],
)
def test_text_that_kubectl_cannot_read_is_refused_in_its_place(text: str, says: str) -> None:
    if not says:
        assert read(text) == {"a": ["ls"]}, "a tag makes nothing"
        return
    with pytest.raises(UnreadableYaml) as refusal:
        read(text)
    (fault,) = refusal.value.faults
    assert f"{fault.line}: {fault.sentence}".startswith(says)


@pytest.mark.parametrize("digit", ["1", "0", "0x1", "_", "1_", "1."])
def test_endless_number_costs_nothing(digit: str) -> None:
    found = scalar(digit * 300_000)
    assert isinstance(found, str | int | float)
    assert not isinstance(found, float) or math.isfinite(found)


@pytest.mark.parametrize("text", [*VALUES, "two\nlines", "tab\there", "a: b", "- x", "# no comment", "é", "'", '"'])
def test_what_is_dumped_is_read_as_the_same_text(text: str) -> None:
    (document,) = read_documents(yaml.dump({"text": text, "keys": {text: [text]}}, Dumper=Dumper))
    assert document.body == {"text": text, "keys": {text: [text]}}


def test_what_stands_twice_in_memory_is_dumped_twice() -> None:
    batch = {"sequences": 8}
    assert "&" not in yaml.dump([batch, batch], Dumper=Dumper)
