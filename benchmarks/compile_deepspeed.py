"""Compile the DeepSpeed extensions before the runs: DeepSpeed would otherwise compile them in the first step.

`python -m benchmarks.compile_deepspeed [PART ...]` compiles the named parts, by default all that ZeRO-3 needs.
"""

import shutil
import sys
from collections.abc import Sequence

from pseudoreal_dev.machine import packages, paths, shell
from pseudoreal_dev.machine.progress import Cost, progress

from benchmarks.environment import ENVIRONMENT, EXTENSIONS

# AdamW for state on the device, AdamW for offloaded state, and the shared-memory backend opened beside the process
# group.
PARTS = ("FusedAdam", "CPUAdam", "ShareMemComm")


def main(parts: Sequence[str]) -> None:
    packages.install_missing(packages.COMPILER)
    # An interrupted compilation leaves a lock, for which the next compilation would wait forever.
    shutil.rmtree(EXTENSIONS, ignore_errors=True)
    log = paths.logs() / "deepspeed.log"
    for part in parts:
        program = f"from deepspeed.ops.op_builder.cpu import {part}Builder; {part}Builder().load()"
        with progress.step(f"compiling DeepSpeed's {part}", cost=Cost.FIRST_RUN, log=log):
            shell.run([sys.executable, "-c", program], log, environment=ENVIRONMENT)


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)
