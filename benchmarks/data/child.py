"""Run measured programs in fresh processes, which inherit nothing from earlier measurements."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

from pseudoreal_dev.machine import shell
from pydantic import BaseModel

from benchmarks.data.results import LOG

PYTHON = Path(sys.executable)
READERS_PYTHON = Path(".venv-readers/bin/python")
"""Interpreter of the environment with Megatron and datatrove."""
THREADS = os.cpu_count() or 1

Result = TypeVar("Result", bound=BaseModel)


def run(module: str, arguments: BaseModel, result: type[Result], *, threads: int = 1) -> Result:
    """Run `python -m benchmarks.data.MODULE ARGUMENTS RESULT` and return the result.

    Arguments and result are JSON; the result is written to a file. Raises CommandFailed with the end of the log.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        program = ["-m", f"benchmarks.data.{module}", arguments.model_dump_json(), str(file)]
        shell.run([PYTHON, *program], LOG, environment=environment(threads))
        return result.model_validate_json(file.read_bytes())


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of a process with this many compute threads."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Waiting threads must not spin, because there are no cores to spare.
        "OMP_WAIT_POLICY": "passive",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
