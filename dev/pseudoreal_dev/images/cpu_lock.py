"""Writes requirements/trainer-cpu.txt: the packages of requirements/trainer.txt for machines without a GPU.

`make lock` runs it as a program, `python cpu_lock.py UV`, with nothing but Python's own library.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parents[3] / "requirements"
SOURCE, TARGET = REQUIREMENTS / "trainer.txt", REQUIREMENTS / "trainer-cpu.txt"
# torch needs them on Linux, where it comes from the Python index; its build for CPUs needs none of them.
_FOR_GPUS = re.compile(r"(nvidia|cuda)-|triton==")
_HEAD = """\
# requirements/trainer.txt for machines without a GPU, written by `make lock`: torch is its authors' build for CPUs,
# which uv finds by itself (--torch-backend cpu), and what only GPUs need is left out.
"""
_WITHOUT_HASHES = """\
# When this file was written, the index of those builds could not be reached. So torch alone has no hash, only its exact
# version, and whoever installs it trusts that index. `make lock` adds the hashes where the index can be reached.
"""


def entries(text: str) -> list[str]:
    """Return the entries of a requirements file, each with its hashes."""
    return re.findall(r"^[a-z0-9].*(?:\n .*)*\n", text, re.MULTILINE)


def cpu_lock(text: str, ask: Callable[[str], str | None]) -> str:
    """Return the lock for CPUs of the text of trainer.txt.

    `ask` returns the entry of torch's build for CPUs from the entry's `torch==VERSION`, or None where it is unknown.
    """
    kept = [entry for entry in entries(text) if not _FOR_GPUS.match(entry)]
    (torch,) = (entry.split()[0] for entry in kept if entry.startswith("torch=="))
    found = ask(torch)
    build = found or f"{torch}+cpu\n"
    others = [build if entry.startswith("torch==") else entry for entry in kept]
    return "".join([_HEAD, "" if found else _WITHOUT_HASHES, *others])


def _asked_of(uv: str) -> Callable[[str], str | None]:
    options = ["--quiet", "--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--python-version=3.11"]
    command = [uv, "pip", "compile", *options, "--python-platform=linux", "--torch-backend=cpu", "-"]

    def ask(torch: str) -> str | None:
        done = subprocess.run(command, input=torch, capture_output=True, text=True)
        if done.returncode != 0:
            last = done.stderr.strip().splitlines()[-1:] or ["uv said nothing"]
            print(f"{TARGET.name}: torch gets no hashes, because uv cannot read its index: {last[0].strip()}")
            return None
        return "".join(entries(done.stdout))

    return ask


if __name__ == "__main__":
    TARGET.write_text(cpu_lock(SOURCE.read_text(), _asked_of(sys.argv[1])))
