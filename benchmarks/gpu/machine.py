"""The measured machine."""

import os
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from pseudoreal_dev.machine.version import read as read_version

from benchmarks.gpu.results import Machine

COMMIT = Path(__file__).resolve().parents[2] / "COMMIT"
"""File with the commit, in a bundle; in a clone, git knows the commit."""
RELEASE = COMMIT.with_name("RELEASE")
"""File with the version of this project, in a bundle."""


def first_device(kind: str) -> torch.device:
    """Return the first device of a kind. A GPU has its number: torch cannot make a GPU without a number the current
    device of a thread."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, 0)


def describe(device: str) -> Machine:
    on_gpu = device == "cuda"
    return Machine(
        device=torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        driver=_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()[0]
        if on_gpu
        else "none",
        versions={"python": platform.python_version(), "torch": torch.__version__, "triton": _version("triton")},
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        commit=COMMIT.read_text().strip() if COMMIT.exists() else _output("git", "rev-parse", "HEAD"),
        release=RELEASE.read_text().strip() if RELEASE.exists() else str(read_version()),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def file_system(folder: Path) -> str:
    return _output("stat", "--file-system", "--format=%T", str(folder))


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"
