"""Programs that are measured: fresh processes, in which nothing is left of the ones before."""

import os
import sys
import tempfile
from pathlib import Path
from typing import TypeVar

from pseudoreal_dev.machine import shell
from pydantic import BaseModel

from tests.benchmarks.data.results import LOG

PYTHON = Path(sys.executable)
READERS_PYTHON = Path(".venv-readers/bin/python")
"""The interpreter of the environment in which Megatron and datatrove are installed."""
THREADS = os.cpu_count() or 1

Result = TypeVar("Result", bound=BaseModel)


def run(module: str, arguments: BaseModel, result: type[Result], *, threads: int = 1) -> Result:
    """Runs `python -m tests.benchmarks.data.MODULE ARGUMENTS RESULT`, both as JSON, the second in a file. Raises
    CommandFailed with the end of the log."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "result.json")
        program = ["-m", f"tests.benchmarks.data.{module}", arguments.model_dump_json(), str(file)]
        shell.run([PYTHON, *program], LOG, environment=environment(threads))
        return result.model_validate_json(file.read_bytes())


def environment(threads: int) -> dict[str, str]:
    """Variables of a process with so many threads for computing."""
    return {
        "OMP_NUM_THREADS": str(threads),
        # Threads that wait must not spin: there are no cores to spare.
        "OMP_WAIT_POLICY": "passive",
        "RAYON_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
