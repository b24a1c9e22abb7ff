"""One run: fresh processes for one stack and one case, in which nothing is left of the runs before."""

import sys
import tempfile
from pathlib import Path

from pseudoreal_dev.machine import shell
from pydantic import TypeAdapter

from tests.benchmarks.cases import RANKS, Case
from tests.benchmarks.environment import ENVIRONMENT
from tests.benchmarks.results import RESULTS, Step

LOG = RESULTS / "ranks.log"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}")


def run(stack: str, case: Case) -> list[Step]:
    """Trains, and returns all steps, those of the warm-up too. Raises CommandFailed with the end of the log."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder, "steps.json")
        program = ("--module", "tests.benchmarks.rank", stack, case.model_dump_json(), str(steps))
        shell.run([sys.executable, *TORCHRUN, *program], LOG, environment=ENVIRONMENT)
        return TypeAdapter(list[Step]).validate_json(steps.read_bytes())
