"""Finds the project files of a program: all imported modules, including imports inside functions. Pure, except for
reading the files."""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Closure:
    """Project modules, and their imports from outside the project."""

    files: Mapping[str, Path]
    """Module -> its file. Packages are modules too."""
    foreign: Mapping[str, frozenset[str]]
    """Top-level name of a module outside the project -> project modules that import it."""


def closure(roots: Iterable[str], folders: Sequence[Path]) -> Closure:
    """Return the roots and their transitive imports. `folders` contain the project's top-level packages, as on
    sys.path."""
    files: dict[str, Path] = {}
    foreign: dict[str, set[str]] = {}
    waiting, seen = list(roots), set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if (file := find(module, folders)) is None:
            continue
        files[module] = file
        waiting += _packages_of(module)
        for name in imports(file.read_text(), module, is_package=file.name == "__init__.py"):
            if _is_ours(name, folders):
                waiting.append(name)
            else:
                foreign.setdefault(name.partition(".")[0], set()).add(module)
    return Closure(files, {name: frozenset(users) for name, users in foreign.items()})


def modules_below(package: str, folders: Sequence[Path]) -> Iterator[str]:
    """Yield the modules of the package and of its subpackages."""
    for folder in folders:
        top = folder / package.replace(".", "/")
        for file in sorted(top.rglob("*.py")):
            parts = file.relative_to(folder).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def find(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a module. None if the folders have no such file: for a namespace package, and for a class or
    function that `imports` listed as a.b."""
    for folder in folders:
        place = folder / module.replace(".", "/")
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def imports(source: str, module: str, *, is_package: bool) -> set[str]:
    """Return the absolute names imported by the source: `from a import b` gives a and a.b, because b may be a
    module."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            found |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return found


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - node.level + is_package]
    return ".".join([*above, *([node.module] if node.module else [])])


def _packages_of(module: str) -> Iterator[str]:
    parts = module.split(".")
    yield from (".".join(parts[:length]) for length in range(1, len(parts)))


def _is_ours(name: str, folders: Sequence[Path]) -> bool:
    top = name.partition(".")[0]
    return any((folder / top).is_dir() or (folder / f"{top}.py").is_file() for folder in folders)
