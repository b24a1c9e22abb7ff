"""The rooms of each package, and a drawing of them: `python -m tests.rooms` puts it into CONTRIBUTING.md."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pseudoreal
import pseudoreal_api
import pseudoreal_client
import pseudoreal_dev
import pseudoreal_operator
import pseudoreal_trainer
from pseudoreal_dev.machine import paths


@dataclass(frozen=True)
class Package:
    """`rooms`: folders, each importing only what stands before it ("" is the top level); `programs` import anything."""

    name: str
    folder: Path
    rooms: tuple[str, ...]
    programs: tuple[str, ...]


API = Package(
    "pseudoreal_api",
    Path(pseudoreal_api.__file__).parent,
    ("", "wire", "spec.rules", "spec", "status", "resolved", "publish"),
    ("__main__",),
)
OPERATOR = Package(
    "pseudoreal_operator",
    Path(pseudoreal_operator.__file__).parent,
    ("", "metrics", "cluster", "observe", "status", "failures", "manifests", "lifecycle", "endpoint", "loop"),
    ("__main__", "release", "self_test"),
)
CLIENT = Package("pseudoreal", Path(pseudoreal.__file__).parent, ("",), ())
COMMANDS = Package(
    "pseudoreal_client",
    Path(pseudoreal_client.__file__).parent,
    ("", "view", "capacity", "commands", "ui"),
    ("completion",),
)
TRAINER = Package(
    "pseudoreal_trainer",
    Path(pseudoreal_trainer.__file__).parent,
    (
        *("", "plan", "plan.memory", "plan.placement", "estimate.time", "estimate"),
        *("estimate.search", "estimate.advice"),
        *("storage", "accelerator", "runtime.rendezvous", "runtime", "model"),
        *("data.tokenizer", "data.tokens", "data", "data.prepare.reading", "data.prepare.formats", "data.prepare"),
        *("checkpoint", "convert", "engine.ranks", "engine.state", "engine"),
        *("preflight", "training", "measure", "report", "ui", "cli"),
    ),
    ("__main__",),
)
DEV = Package(
    "pseudoreal_dev",
    Path(pseudoreal_dev.__file__).parent,
    ("machine", "site", "bundle", "krew", "neighbours", "cluster", "images", "release", "demo", ""),
    ("__main__",),
)
PACKAGES = (API, OPERATOR, CLIENT, COMMANDS, TRAINER, DEV)
CONTRIBUTING = paths.REPOSITORY / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- rooms: written by python -m tests.rooms -->\n", "<!-- end of rooms -->\n"


def files(package: Package, room: str) -> list[Path]:
    files = package.folder.joinpath(*room.split(".")).glob("*.py")
    return [file for file in files if file.stem not in (*package.programs, "__init__")]


def imported_rooms(package: Package, file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package.name:
            for alias in node.names:
                yield _room_of(package, f"{node.module}.{alias.name}".split(".")[1:])


def _room_of(package: Package, path: list[str]) -> str:
    """The longest room that the path of a module, or of a name in one, begins with."""
    found = (".".join(path[:count]) for count in range(len(path), -1, -1))
    return next(room for room in found if room in package.rooms)


def drawing() -> str:
    """Mermaid. An arrow points to the room that is imported; those that follow from others are left out."""
    lines = ["```mermaid", "flowchart LR"]
    for package in (API, OPERATOR, CLIENT, COMMANDS, TRAINER):
        lines += [f"  subgraph {package.name}", *(f"    {line}" for line in _arrows(package)), "  end"]
    lines += [f"  {package.name} --> {API.name}" for package in (OPERATOR, TRAINER)]
    lines += [f"  {CLIENT.name} --> {package.name}" for package in (OPERATOR, TRAINER)]
    lines += [f"  {COMMANDS.name} --> {CLIENT.name}"]
    return "\n".join([*lines, "```\n"])


def _arrows(package: Package) -> Iterator[str]:
    needs = {room: _imports_of(package, room) for room in package.rooms if room}
    for room, direct in needs.items():
        beyond = {far for near in direct for far in _reached(needs, near)}
        nearest = [_node(package, near) for near in sorted(direct - beyond, key=package.rooms.index)]
        node = f"{_node(package, room)}[{room}]"
        yield f"{node} --> {' & '.join(nearest)}" if nearest else node


def _node(package: Package, room: str) -> str:
    return f"{package.name.removeprefix('pseudoreal_')}_{room.replace('.', '_')}"


def _imports_of(package: Package, room: str) -> set[str]:
    found = {name for file in files(package, room) for name in imported_rooms(package, file)}
    return found - {room, ""}


def _reached(needs: dict[str, set[str]], room: str) -> set[str]:
    """Rooms that it imports, and those that these import."""
    return needs[room] | {far for near in needs[room] for far in _reached(needs, near)}


def with_drawing(text: str) -> str:
    head, rest = text.split(_BEGIN)
    return f"{head}{_BEGIN}{drawing()}{_END}{rest.split(_END)[1]}"


if __name__ == "__main__":
    CONTRIBUTING.write_text(with_drawing(CONTRIBUTING.read_text()))
