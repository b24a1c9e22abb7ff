"""Waits of the engine: every call in its source that makes a stream or a thread wait."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

import pseudoreal_trainer

_PACKAGE = Path(pseudoreal_trainer.__file__).parent
_FOLDERS = tuple(_PACKAGE / folder for folder in ("accelerator", "engine"))
NAMES = ("wait", "wait_event", "synchronize")
PRIMITIVES = ("Streams.", "synchronize")
"""Functions of `ranks/streams.py` that the other waits consist of."""


@dataclass(frozen=True, order=True)
class Site:
    """A place in the engine's source: a call of a function named in `NAMES`."""

    file: str
    """Path below the trainer's package."""
    function: str
    call: str
    """Source of the call."""
    number: int = 0
    """Number among the same calls in the function."""

    def __str__(self) -> str:
        again = f" (again, {self.number})" if self.number else ""
        return f"{self.file} {self.function}: {self.call}{again}"


_Position = tuple[int, int]
"""Last line and column of a call in its file."""


@cache
def sites() -> dict[Site, tuple[str, _Position]]:
    """Return each wait of the engine with its file and position."""
    found: dict[Site, tuple[str, _Position]] = {}
    for path in sorted(path for folder in _FOLDERS for path in folder.rglob("*.py")):
        file = path.relative_to(_PACKAGE).as_posix()
        for function, call in _calls(ast.parse(path.read_text()), ""):
            if file == "engine/ranks/streams.py" and function.startswith(PRIMITIVES):
                continue
            site = Site(file, function, ast.unparse(call))
            while site in found:
                site = Site(site.file, site.function, site.call, site.number + 1)
            assert call.end_lineno is not None, "calls that were parsed have positions"
            assert call.end_col_offset is not None, "calls that were parsed have positions"
            found[site] = str(path), (call.end_lineno, call.end_col_offset)
    return found


@cache
def _at() -> dict[tuple[str, _Position], Site]:
    return {position: site for site, position in sites().items()}


def site_of(frame: FrameType) -> Site | None:
    """Return the wait that a frame is executing; None outside the engine's waits."""
    positions = [*frame.f_code.co_positions()][frame.f_lasti // 2]
    _, end_line, _, end_column = positions
    assert end_line is not None, "Python keeps the positions of calls unless it is told not to"
    assert end_column is not None, "Python keeps the positions of calls unless it is told not to"
    return _at().get((frame.f_code.co_filename, (end_line, end_column)))


def engine_frame() -> FrameType | None:
    """Return the innermost frame of this thread that executes the engine."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_engine(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@cache
def _is_engine(path: str) -> bool:
    return path.startswith(tuple(f"{folder}/" for folder in _FOLDERS))


def _calls(tree: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.iter_child_nodes(tree):
        name = function
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{function}.{node.name}" if function else node.name
        if isinstance(node, ast.Call) and _called(node.func) in NAMES:
            yield name, node
        yield from _calls(node, name)


def _called(function: ast.expr) -> str:
    match function:
        case ast.Attribute():
            return function.attr
        case ast.Name():
            return function.id
        case _:
            return ""
