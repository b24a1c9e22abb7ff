"""Imports between tests: shared code is in `support`, and benchmarks use nothing else of the tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pseudoreal_dev.bundle import sources
from pseudoreal_dev.machine import paths

TESTS = paths.REPOSITORY / "tests"


def _imported(folder: str) -> Iterator[tuple[Path, str]]:
    """Yield each file of the folder with every module that it imports from the tests."""
    for file in (TESTS / folder).rglob("*.py"):
        module = ".".join(file.relative_to(paths.REPOSITORY).with_suffix("").parts)
        for name in sources.imports(file.read_text(), module, is_package=False):
            if name.startswith("tests."):
                yield file, name


@pytest.mark.parametrize(("folder", "allowed"), [("support", ("support",)), ("benchmarks", ("benchmarks", "support"))])
def test_it_imports_only_what_is_shared(folder: str, allowed: tuple[str, ...]) -> None:
    found = [*_imported(folder)]
    assert found
    assert not [(file.name, name) for file, name in found if name.split(".")[1] not in allowed]


def test_no_test_file_is_imported() -> None:
    """Code needed by several test files is in a file of its own."""
    assert not [
        (file.name, name) for file, name in _imported(".") if any(p.startswith("test_") for p in name.split("."))
    ]
