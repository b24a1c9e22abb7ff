"""Docstrings can be read alone: none is a fragment that needs the name above it to become a sentence."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("crds", "operator", "trainer", "dev", "tests")
FRAGMENT = re.compile(r"(Of|That|As|In that)\b")


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module, class or function, and of each string below an attribute."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.strip()


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_is_a_fragment(folder: str) -> None:
    found = [
        (file, *each) for file in (ROOT / folder).rglob("*.py") for each in docstrings(ast.parse(file.read_text()))
    ]
    fragments = [f"{file.relative_to(ROOT)}:{line}: {text}" for file, line, text in found if FRAGMENT.match(text)]
    assert found
    assert fragments == []


def test_every_kind_of_docstring_is_read() -> None:
    source = '''"""Of a module."""
class A:
    """Of a class."""
    x: int
    """Of x."""
    def f():
        "Of f."
'''
    assert [text for _, text in docstrings(ast.parse(source))] == ["Of a module.", "Of a class.", "Of x.", "Of f."]
