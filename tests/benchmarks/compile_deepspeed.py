"""Compiles the parts of DeepSpeed that it would compile in its first step, so that no run waits for them: all that its
ZeRO-3 needs, or those that are named, `python -m tests.benchmarks.compile_deepspeed [PART ...]`."""

import shutil
import sys
from collections.abc import Sequence

from pseudoreal_dev.machine import packages, paths, shell
from pseudoreal_dev.machine.progress import Cost, progress

from tests.benchmarks.environment import ENVIRONMENT, EXTENSIONS

# Its AdamW for state on the device, its AdamW for offloaded state, and what it opens beside its process group.
PARTS = ("FusedAdam", "CPUAdam", "ShareMemComm")


def main(parts: Sequence[str]) -> None:
    packages.install_missing(packages.COMPILER)
    # A compilation that was interrupted leaves a lock behind, for which the next one would wait forever.
    shutil.rmtree(EXTENSIONS, ignore_errors=True)
    log = paths.logs() / "deepspeed.log"
    for part in parts:
        program = f"from deepspeed.ops.op_builder.cpu import {part}Builder; {part}Builder().load()"
        with progress.step(f"compiling DeepSpeed's {part}", cost=Cost.FIRST_RUN, log=log):
            shell.run([sys.executable, "-c", program], log, environment=ENVIRONMENT)


if __name__ == "__main__":
    main(sys.argv[1:] or PARTS)
