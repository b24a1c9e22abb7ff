"""Launch one run: fresh processes for one stack and one case, which inherit nothing from earlier runs."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import shell
from pydantic import TypeAdapter

from benchmarks.cases import RANKS, Case
from benchmarks.environment import ENVIRONMENT
from benchmarks.results import SCRATCH, Step

LOG = SCRATCH / "ranks.log"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}")


@dataclass(frozen=True)
class Outcome:
    steps: list[Step]
    """All steps, including warm-up."""
    crashed_at_end: bool
    """True if the processes crashed while ending, after the last step; the measurements are complete."""


def run(stack: str, case: Case) -> Outcome:
    """Train the case with the stack. Raises CommandFailed with the end of the log if the processes crash before their
    last step."""
    with tempfile.TemporaryDirectory() as folder:
        steps, crashed = Path(folder, "steps.json"), False
        program = ("--module", "benchmarks.rank", stack, case.model_dump_json(), str(steps))
        try:
            shell.run([sys.executable, *TORCHRUN, *program], LOG, environment=ENVIRONMENT)
        except shell.CommandFailed:
            if not steps.exists():
                raise
            crashed = True
        return Outcome(TypeAdapter(list[Step]).validate_json(steps.read_bytes()), crashed)
