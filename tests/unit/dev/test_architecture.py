"""Paths in docs/architecture.md exist, and `path:Name` references name what that file defines."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.documents import ROOT, folders, spans

DOCUMENT = ROOT / "docs/architecture.md"
_PATH = re.compile(r"(?P<path>[\w.-]+(?:/[\w.-]+)+)(?::(?P<name>\w+(?:\.\w+)*))?")

REFERENCES = [match for span in sorted({*spans(DOCUMENT)}) if (match := _PATH.fullmatch(span))]


def test_the_document_names_paths_and_definitions() -> None:
    assert sum(one["name"] is not None for one in REFERENCES) > 30


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda one: one[0])
def test_paths_and_definitions_of_the_architecture_exist(reference: re.Match[str]) -> None:
    found = _found(reference["path"])
    assert found, f"{reference['path']} does not exist"
    if reference["name"] is not None:
        assert any(reference["name"] in _defined(path) for path in found), f"{reference[0]} is not defined"


def test_a_missing_path_and_a_missing_definition_are_noticed() -> None:
    assert not _found("loop/no_such_file.py")
    names = _defined(ROOT / "trainer/pseudoreal_trainer/engine/engine.py")
    assert "Engine.train" in names
    assert "Engine.no_such_method" not in names


def _found(path: str) -> list[Path]:
    return [folder / path for folder in folders(DOCUMENT) if (folder / path).exists()]


def _defined(path: Path) -> list[str]:
    """Return the names that a module defines at its top level, with methods as `Class.method`."""
    return [*_names(ast.parse(path.read_text()).body, "")]


def _names(body: list[ast.stmt], prefix: str) -> Iterator[str]:
    for statement in body:
        match statement:
            case ast.ClassDef():
                yield prefix + statement.name
                yield from _names(statement.body, f"{prefix}{statement.name}.")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield prefix + statement.name
            case ast.Assign():
                yield from (prefix + target.id for target in statement.targets if isinstance(target, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield prefix + name
