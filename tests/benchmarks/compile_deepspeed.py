"""Compiles the parts of DeepSpeed that it would compile in its first step, so that no run waits for them."""

import shutil
import sys

from pseudoreal_dev.machine import packages, paths, shell
from pseudoreal_dev.machine.progress import Cost, progress

from tests.benchmarks.environment import ENVIRONMENT, EXTENSIONS

# Its AdamW for state on the device, its AdamW for offloaded state, and what it opens beside its process group.
PARTS = ("FusedAdamBuilder", "CPUAdamBuilder", "ShareMemCommBuilder")


def main() -> None:
    packages.install_missing(packages.COMPILER)
    # A compilation that was interrupted leaves a lock behind, for which the next one would wait forever.
    shutil.rmtree(EXTENSIONS, ignore_errors=True)
    log = paths.logs() / "deepspeed.log"
    for part in PARTS:
        program = f"from deepspeed.ops.op_builder.cpu import {part}; {part}().load()"
        with progress.step(f"compiling DeepSpeed's {part.removesuffix('Builder')}", cost=Cost.FIRST_RUN, log=log):
            shell.run([sys.executable, "-c", program], log, environment=ENVIRONMENT)


if __name__ == "__main__":
    main()
