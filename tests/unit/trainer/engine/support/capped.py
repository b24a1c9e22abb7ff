"""Programs under a hard limit on their memory: their environment, and the memory that they use before training."""

import os
import subprocess
import sys

_BASELINE = """
import pseudoreal_trainer.training.phase
print(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1])
"""


def environment() -> dict[str, str]:
    # Stacks and arenas count as data, and by default their number depends on the machine. With a fixed threshold, the C
    # library returns freed memory to the system.
    own = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "1048576"}
    return dict(os.environ) | own


def baseline() -> int:
    """Return the bytes of data that the program has before it makes an engine."""
    said = subprocess.run([sys.executable, "-c", _BASELINE], env=environment(), capture_output=True, check=True)
    return int(said.stdout) * 1024
