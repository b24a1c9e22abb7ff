"""Run all stacks in all cases alternately, in fresh processes of the peers' environment, which inherit nothing from
earlier runs."""

import tempfile
from collections.abc import Iterable
from pathlib import Path

from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.progress import progress
from pydantic import TypeAdapter

from benchmarks.moe.beside.agreement import check
from benchmarks.moe.beside.cases import CASES, RANKS, ROUNDS, Case
from benchmarks.moe.beside.names import stacks_of
from benchmarks.moe.results import LOG, Beside, Run, Step

PYTHON = Path(".venv-moe/bin/python")
"""Interpreter of the environment with DeepSpeed and torchtitan."""
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={RANKS}")
_ENVIRONMENT = {
    # ninja is beside python; DeepSpeed uses ninja to compile the backend opened beside its process group.
    "PATH": f"{PYTHON.parent.absolute()}:/usr/local/bin:/usr/bin:/bin",
    "TORCH_EXTENSIONS_DIR": str(PYTHON.parent.parent.absolute() / "extensions"),
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    # One core per rank; waiting threads must not spin.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "GLOO_SOCKET_IFNAME": "lo",
}


def measure() -> Beside:
    """Measure. Raises LossesDiffer if two stacks do not compute the same."""
    runs = list[Run]()
    for turn in range(ROUNDS):
        for case in CASES:
            for stack in stacks_of(case):
                with progress.step(f"{case.label}, {case.compute}, {turn + 1} of {ROUNDS}: {stack}", log=LOG):
                    found = _run(stack, case)
                check(found, runs)
                runs.append(found)
    return Beside(runs=runs, versions=_versions())


def _run(stack: str, case: Case) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "steps.json")
        program = ("--module", "benchmarks.moe.beside.rank", stack, case.model_dump_json(), str(file))
        try:
            shell.run([PYTHON, *_TORCHRUN, *program], LOG, environment=_ENVIRONMENT)
        except shell.CommandFailed as error:
            # A process that crashes while ending, after its last step, has measured everything.
            if not file.exists():
                return Run(stack=stack, case=case, error=message_in(str(error).splitlines()))
        return Run(stack=stack, case=case, steps=TypeAdapter(list[Step]).validate_json(file.read_bytes()))


def message_in(log: Iterable[str]) -> str:
    """Return the message of the last exception at the end of a log; without one, the last line."""
    lines = [line.strip() for line in log if line.strip(" =-")]
    return next((line for line in reversed(lines) if "Error: " in line), lines[-1])


def _versions() -> dict[str, str]:
    program = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"
    packages = ("torch", "deepspeed", "torchtitan")
    return dict(zip(packages, shell.output([PYTHON, "-c", program, *packages]).split(), strict=True))
