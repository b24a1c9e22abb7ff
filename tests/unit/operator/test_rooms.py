"""The rooms of the operator: what is pure loads no client, and imports go one way."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pseudoreal_operator
import pytest

PACKAGE = Path(pseudoreal_operator.__file__).parent
ROOMS = ("", "cluster", "observe", "tell", "diagnose", "manifests", "decide", "reports", "controller")
"""Each imports only what stands before it."""
PROGRAMS = ("__main__", "release", "self_test")
EFFECTS = ("observe.requests",)
PURE = ("observe", "tell", "diagnose", "manifests", "decide")


def _modules(room: str) -> list[str]:
    files = [path for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py"]
    assert files, room
    return [".".join(filter(None, (room, path.stem))) for path in files]


def _imports(module: str) -> Iterator[str]:
    """The rooms from which a module imports."""
    tree = ast.parse((PACKAGE / module.replace(".", "/")).with_suffix(".py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pseudoreal_operator"):
            inside = node.module.split(".")[1:]
            for name in inside[:1] or [alias.name for alias in node.names]:
                yield name if name in ROOMS else ""


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_stands_before_it(room: str) -> None:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    for module in _modules(room):
        if module not in PROGRAMS:
            assert set(_imports(module)) <= set(allowed), module


def test_what_is_pure_loads_no_client() -> None:
    modules = [module for room in PURE for module in _modules(room) if module not in EFFECTS]
    program = "import sys\n" + "".join(f"import pseudoreal_operator.{module}\n" for module in modules)
    program += "print(*sorted({'kopf', 'aiohttp', 'kubernetes', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
