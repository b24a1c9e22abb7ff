"""One run: fresh processes for one stack and one case, in which nothing is left of the runs before."""

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_dev.machine import shell
from pydantic import TypeAdapter

from tests.benchmarks.cases import RANKS, Case
from tests.benchmarks.environment import ENVIRONMENT
from tests.benchmarks.results import RESULTS, Step

LOG = RESULTS / "ranks.log"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}")


@dataclass(frozen=True)
class Outcome:
    steps: list[Step]
    """All steps, those of the warm-up too."""
    crashed_at_end: bool
    """Whether its processes crashed after the last step, when they ended; what they measured is whole."""


def run(stack: str, case: Case) -> Outcome:
    """Trains. Raises CommandFailed with the end of the log when the processes crash before their last step."""
    with tempfile.TemporaryDirectory() as folder:
        steps, crashed = Path(folder, "steps.json"), False
        program = ("--module", "tests.benchmarks.rank", stack, case.model_dump_json(), str(steps))
        try:
            shell.run([sys.executable, *TORCHRUN, *program], LOG, environment=ENVIRONMENT)
        except shell.CommandFailed:
            if not steps.exists():
                raise
            crashed = True
        return Outcome(TypeAdapter(list[Step]).validate_json(steps.read_bytes()), crashed)
