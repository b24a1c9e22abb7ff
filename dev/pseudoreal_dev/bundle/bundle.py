"""Creates `.gpu-bundle/`: everything needed for tests/gpu, benchmarks/gpu and the trials of benchmarks/method on a
machine with a GPU and no network."""

import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from pseudoreal_dev.bundle import sources, wheels
from pseudoreal_dev.machine import paths, shell, version
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

FOLDER = paths.REPOSITORY / ".gpu-bundle"
LIMIT_BYTES = 45 * 2**20
PACKAGES = ("pseudoreal_api", "pseudoreal_trainer", "tests.gpu", "benchmarks.gpu")
"""Packages copied whole, with all their imports."""
STARTED_BY_NAME = ("benchmarks.method.gpu", "tests.support.warm")
"""Modules started or imported by name only, without an import statement."""
IMPORTABLE = frozenset(
    {"torch", "numpy", "safetensors", "rich", "typer", "pytest", "fsspec", "jinja2", "markupsafe", "packaging"}
)
"""Modules available on the GPU machine, besides the standard library. torch requires jinja2, which requires markupsafe;
pytest requires packaging."""
OPTIONAL = frozenset(
    {
        "s3fs",
        "botocore",
        "aiobotocore",
        "huggingface_hub",
        "tensorboardX",
        "wandb",
        "mlflow",
        "pyarrow",
        "tokenizers",
        "matplotlib",
        "starlette",
        "uvicorn",
    }
)
"""Modules imported only for object storage, metrics services, data preparation, pictures and the live page."""
_GONE = frozenset({"asynchat", "asyncore", "distutils", "imp", "smtpd"})
"""Standard library modules removed after Python 3.11; this machine's Python may have them."""
_SEARCHED = tuple(paths.REPOSITORY / name for name in ("crds", "trainer", "dev", "."))
_PYTEST = """[pytest]
addopts = -ra --strict-markers --import-mode=importlib -p no:cacheprovider
markers =
    gpu: needs a GPU that torch can use
"""


def make() -> None:
    """Create the bundle. Raises DevError if the bundle would lack a module, or is too large."""
    found = project_sources()
    with progress.step("fetching the wheels"):
        carried = wheels.fetch(FOLDER / "wheels", _pins())
    check_wheels(carried)
    check_imports(found.foreign, {*wheels.top_level(carried)})
    _write(found)
    size = check_size(FOLDER)
    progress.note(f"{FOLDER.name}: {len(found.files)} modules, {len(carried)} wheels, {size / 2**20:.1f} MiB")
    progress.note(f"on a machine with a GPU: bash {FOLDER.name}/run.sh all|doctor|test|bench|profile|method")


def project_sources() -> sources.Closure:
    roots = [module for package in PACKAGES for module in sources.modules_below(package, _SEARCHED)]
    return sources.closure([*roots, *STARTED_BY_NAME], _SEARCHED)


def check_imports(foreign: Mapping[str, Iterable[str]], carried: set[str]) -> None:
    """Raise DevError for an import missing both on the GPU machine and in the bundle."""
    known = (sys.stdlib_module_names - _GONE) | IMPORTABLE | OPTIONAL | carried
    missing = {name: sorted(users) for name, users in foreign.items() if name not in known}
    if missing:
        named = "; ".join(f"{name}, imported by {', '.join(users[:3])}" for name, users in sorted(missing.items()))
        raise DevError(f"the bundle would lack {named}. Add its package to dev/pseudoreal_dev/bundle/wheels.py")


def check_wheels(carried: Iterable[Path]) -> None:
    if misfits := wheels.misfits(carried):
        raise DevError(f"Python {wheels.PYTHON} on Linux would not take {', '.join(misfits)}")


def check_size(folder: Path, limit: int = LIMIT_BYTES) -> int:
    """Return the total size of the files, in bytes. Raises DevError, naming the largest files, if the size exceeds the
    limit."""
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    total = sum(sizes.values())
    if total > limit:
        largest = sorted(sizes, key=sizes.__getitem__, reverse=True)[:3]
        named = ", ".join(f"{file.relative_to(folder)} ({sizes[file] / 2**20:.1f} MiB)" for file in largest)
        raise DevError(
            f"{folder.name} has {total / 2**20:.1f} MiB, more than the {limit / 2**20:.1f} allowed; largest: {named}"
        )
    return total


def _pins() -> dict[str, str]:
    return wheels.pins_in((paths.REPOSITORY / "requirements" / "all.txt").read_text())


def _write(found: sources.Closure) -> None:
    shutil.rmtree(FOLDER / "src", ignore_errors=True)
    for module, file in found.files.items():
        place = FOLDER / "src" / module.replace(".", "/")
        target = place / "__init__.py" if file.name == "__init__.py" else place.with_name(f"{place.name}.py")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target)
    (FOLDER / "src" / "pytest.ini").write_text(_PYTEST)
    (FOLDER / "src" / "COMMIT").write_text(_commit() + "\n")
    (FOLDER / "src" / "RELEASE").write_text(f"{version.read()}\n")
    shutil.copyfile(Path(__file__).with_name("run.sh"), FOLDER / "run.sh")


def _commit() -> str:
    def git(*words: str) -> str:
        return shell.output(["git", "-C", paths.REPOSITORY, *words]).strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")
