"""References `path:Name` in the documents name files that exist, and names that these files define."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.documents import ROOT, folders, spans

ARCHITECTURE = ROOT / "docs/architecture.md"
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("operator/*.md")])
_REFERENCE = re.compile(r"(?P<path>[\w.-]+(?:/[\w.-]+)+)(?::(?P<name>\w+(?:\.\w+)*))?")


@dataclass(frozen=True)
class Reference:
    document: Path
    path: str
    name: str | None

    def __str__(self) -> str:
        return f"{self.document.name} {self.path}{':' + self.name if self.name else ''}"


def _references(document: Path) -> Iterator[Reference]:
    """Yield each reference once. Outside docs/architecture.md, a path without a name may be a path of a machine."""
    for span in sorted({*spans(document)}):
        match = _REFERENCE.fullmatch(span)
        if match and (match["name"] or document == ARCHITECTURE):
            yield Reference(document, match["path"], match["name"])


REFERENCES = [reference for document in DOCUMENTS for reference in _references(document)]


def test_the_architecture_refers_to_definitions() -> None:
    assert sum(one.document == ARCHITECTURE and one.name is not None for one in REFERENCES) > 30


@pytest.mark.parametrize("reference", REFERENCES, ids=str)
def test_a_reference_in_a_document_exists(reference: Reference) -> None:
    found = _found(reference)
    assert found, f"{reference.path} does not exist"
    if reference.name is not None:
        assert any(reference.name in _defined(path) for path in found), f"{reference} is not defined"


def test_a_missing_path_and_a_missing_definition_are_noticed() -> None:
    assert not _found(Reference(ARCHITECTURE, "loop/no_such_file.py", None))
    names = _defined(ROOT / "trainer/pseudoreal_trainer/training/phase.py")
    assert "train_phase" in names
    assert "train_no_phase" not in names


def _found(reference: Reference) -> list[Path]:
    places = [folder / reference.path for folder in folders(reference.document)]
    return [place for place in places if place.exists()]


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
