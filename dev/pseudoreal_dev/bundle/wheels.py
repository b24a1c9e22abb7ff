"""Wheels missing on the GPU machine, at the versions pinned in requirements/, for the machine's Python and
processor."""

import re
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

from pseudoreal_dev.machine import paths, shell
from pseudoreal_dev.machine.errors import DevError

PYTHON = "3.12"
ROOTS = (
    *("pydantic", "structlog", "pyyaml", "click", "common-expression-language", "prometheus-client"),
    "typing-extensions",
)
"""Packages imported by the API package and the trainer, except PRESENT. torch brings typing-extensions too, but in an
older version than pydantic needs."""
PRESENT = frozenset(
    {
        *("torch", "numpy", "safetensors", "rich", "typer", "pytest"),
        # Requirements of torch and rich.
        *("fsspec", "filelock", "jinja2", "networkx", "sympy", "markdown-it-py", "mdurl", "pygments"),
        # Requirements of typer and pytest.
        *("shellingham", "annotated-doc", "iniconfig", "packaging", "pluggy"),
    }
)
"""Packages installed on the GPU machine."""
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_ENVIRONMENT = {
    "python_version": PYTHON,
    "python_full_version": f"{PYTHON}.0",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "extra": "",
}


def fetch(folder: Path, pins: Mapping[str, str]) -> list[Path]:
    """Download the missing wheels and, recursively, their requirements. Raises DevError for a package without a pin,
    and CommandFailed."""
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Path] = {}
    waiting = [*ROOTS]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found[name] = _fetched(folder, name, pins)
        waiting += [needed for needed in needs(metadata(found[name])) if needed not in PRESENT]
    for stale in {*folder.glob("*.whl")} - {*found.values()}:
        stale.unlink()
    return sorted(found.values())


def pins_in(text: str) -> dict[str, str]:
    """Return package -> version pinned in a requirements file. Lines for other Python versions than the GPU machine's
    are ignored."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if "==" not in line:
            continue
        wanted = Requirement(line.removesuffix("\\"))
        if wanted.marker is None or wanted.marker.evaluate(_ENVIRONMENT):
            found[canonicalize_name(wanted.name)] = next(iter(wanted.specifier)).version
    return found


def needs(text: str) -> list[str]:
    """Return the packages required by a wheel with this metadata, without the packages of extras."""
    required = [Requirement(line) for line in HeaderParser().parsestr(text).get_all("Requires-Dist", [])]
    return [canonicalize_name(r.name) for r in required if r.marker is None or r.marker.evaluate(_ENVIRONMENT)]


def metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as file:
        name = next(name for name in file.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return file.read(name).decode()


def top_level(wheels: Iterable[Path]) -> Iterator[str]:
    """Yield the importable names of the unpacked wheels."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                first, _, rest = name.partition("/")
                if not first.endswith((".dist-info", ".data")) and (rest or first.endswith((".py", ".so"))):
                    yield first.partition(".")[0]


def misfits(wheels: Iterable[Path]) -> list[str]:
    """Return the names of the wheels incompatible with the GPU machine's Python."""
    return [wheel.name for wheel in wheels if not any(map(_fits, parse_wheel_filename(wheel.name)[3]))]


def _fits(tag: Tag) -> bool:
    if tag.platform not in (*_PLATFORMS, "any"):
        return False
    version = PYTHON.replace(".", "")
    if tag.abi == "none":
        return tag.interpreter in ("py3", f"py{version}", f"cp{version}")
    if tag.abi == "abi3":
        return tag.interpreter.startswith("cp3") and int(tag.interpreter.removeprefix("cp")) <= int(version)
    return tag.interpreter == tag.abi == f"cp{version}"


def _fetched(folder: Path, name: str, pins: Mapping[str, str]) -> Path:
    if (known := _wheel_of(folder, name, pins)) is not None:
        return known
    if name not in pins:
        raise DevError(f"the bundle needs {name}, of which requirements/all.txt has no version; run `make lock`")
    platforms = [word for platform in _PLATFORMS for word in ("--platform", platform)]
    abis = [word for abi in (f"cp{PYTHON.replace('.', '')}", "abi3", "none") for word in ("--abi", abi)]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        *options,
        *platforms,
        *abis,
        "--dest",
        folder,
    ]
    shell.run([*command, f"{name}=={pins[name]}"], paths.logs() / "gpu-bundle.log")
    wheel = _wheel_of(folder, name, pins)
    assert wheel is not None, f"pip has downloaded a wheel of {name}"
    return wheel


def _wheel_of(folder: Path, name: str, pins: Mapping[str, str]) -> Path | None:
    for wheel in folder.glob("*.whl"):
        package, version, _, _ = parse_wheel_filename(wheel.name)
        if (package, str(version)) == (name, pins.get(name)):
            return wheel
    return None
