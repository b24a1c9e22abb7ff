"""Run the tests of this folder within a time limit, each file in a process: `python -m tests.gpu.run [pytest options]`.

A test that hangs or crashes ends only its own file.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

SECONDS = 460.0
"""Eight minutes, less the time for start and end."""
FILES = (
    *("test_preflight", "test_memory", "test_pinned", "test_experts", "test_documents"),
    *("test_stacks", "test_overlap", "test_losses", "test_nccl"),
)
"""The most informative files first; the long file is last but one."""
_ENVIRONMENT = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other pytest plugins on the machine are not loaded."""
_NOTHING_RAN = 5
"""Exit code of pytest if no test was collected."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="in all")
    own, options = parser.parse_known_args(arguments)
    begin, failed = time.monotonic(), list[str]()
    end = begin + own.seconds
    for name in FILES:
        left = end - time.monotonic()
        problem = _run(name, options, left) if left > 0 else "left out: the time was over"
        if problem is not None:
            failed.append(f"{name}: {problem}")
    print(*(failed or ["every file passed or was skipped with a sentence"]), sep="\n", flush=True)
    print(f"{time.monotonic() - begin:.0f} s in all")
    return 1 if failed else 0


def _run(name: str, options: list[str], seconds: float) -> str | None:
    """Run a file; return its problem, or None."""
    print(f"\n== {name}", flush=True)
    here = Path(__file__).resolve().parent
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(here / f"{name}.py"), *options]
    try:
        code = subprocess.run(command, cwd=here.parents[1], env=_ENVIRONMENT, timeout=seconds, check=False).returncode
    except subprocess.TimeoutExpired:
        return "stopped: the time was over"
    return None if code in (0, _NOTHING_RAN) else f"ended with exit code {code}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
