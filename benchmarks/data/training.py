"""A Llama on prepared text, trained by the trainer's own loop and by plain torch with `transformers`' model.

Both have the same initial weights, batches and optimizer. They alternate, each turn in a process with the same number
of threads.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_dev.machine import shell
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.checkpoint.store import store_of
from pseudoreal_trainer.convert.huggingface import Options, write_huggingface
from pseudoreal_trainer.plan.units import units_of
from pydantic import BaseModel

from benchmarks.data import child
from benchmarks.data.job import (
    AS_GOOD_AS_ZERO,
    FULL,
    PHASE,
    TINY,
    Size,
    batches,
    config_of,
    in_words,
    write_tokens,
)
from benchmarks.data.results import LOG, OURS, PLAIN, Cell, Training
from benchmarks.data.same import largest_difference

CASE = "ms per step"


class Work(BaseModel, frozen=True):
    """Input of the plain loop."""

    model: str
    """Folder of the exported model."""
    batches: str
    """File of the samples, [steps, sequences, T + 1]."""
    optimizer: Optimizer


class Steps(BaseModel, frozen=True):
    """Steps of one turn."""

    seconds: list[float]
    losses: list[float]
    """Loss before each step's update, in nats per token."""
    waited: list[float] = []
    """Seconds of each step spent waiting for data."""


def measure(folder: Path, tiny: bool) -> Training:
    size = TINY if tiny else FULL
    tokens, export = folder / "tokens", folder / "export"
    with progress.step("preparing what a Llama is trained on"):
        write_tokens(tokens, size)
        export_first_weights(size, tokens, folder / "first", export)
    config = config_of(size, tokens, folder / "work", steps=size.steps)
    np.save(folder / "batches.npy", batches(config, size.steps))
    work = Work(model=str(export), batches=str(folder / "batches.npy"), optimizer=config.optimizer)
    ours, plain = list[Steps](), list[Steps]()
    for turn in range(size.rounds):
        with progress.step(f"training, {turn + 1} of {size.rounds}: {OURS}", log=LOG):
            ours.append(_ours(config))
        with progress.step(f"training, {turn + 1} of {size.rounds}: {PLAIN}", log=LOG):
            plain.append(child.run("plain", work, Steps, threads=child.THREADS))
    return summed_up(config, size.warm_up, ours, plain)


def export_first_weights(size: Size, tokens: Path, work: Path, output: Path) -> None:
    """Export the job's initial weights. The trainer saves no step 0, so it first trains one step that
    changes nothing."""
    config = config_of(size, tokens, work, steps=1, learning_rate=AS_GOOD_AS_ZERO)
    run_rank(config)
    reader = store_of(config).newest(PHASE, complete=True)
    assert reader is not None, "the phase has ended"
    output.mkdir()
    write_huggingface(reader, output, lambda items, _: items, Options())


def run_rank(config: PhaseConfig) -> None:
    """Train as the single rank of a pod. Raises CommandFailed with the end of the log."""
    work = Path(config.work_directory)
    work.mkdir(parents=True)
    file = work / "phase.json"
    file.write_text(config.to_json())
    program = ["-m", "pseudoreal_trainer.cli.rank", str(file)]
    shell.run([child.PYTHON, *program], LOG, environment=child.environment(child.THREADS))


def _ours(config: PhaseConfig) -> Steps:
    run_rank(config)
    work = Path(config.work_directory)
    found = steps_of((work / "metrics.jsonl").read_text())
    shutil.rmtree(work)
    return found


def steps_of(metrics: str) -> Steps:
    """Return the steps in a metrics.jsonl. Its `seconds` are counted from the start of the first step."""
    lines = [json.loads(line) for line in metrics.splitlines()]
    ends = [0.0, *(line["seconds"] for line in lines)]
    return Steps(
        seconds=[end - begin for begin, end in pairwise(ends)],
        losses=[line["loss"] for line in lines],
        waited=[line["data_seconds"] for line in lines],
    )


def summed_up(config: PhaseConfig, warm_up: int, ours: Sequence[Steps], plain: Sequence[Steps]) -> Training:
    """Summarize the turns. Raises LossesDiffer if two turns differ in the loss of a step."""
    expected = plain[0].losses
    apart = [
        largest_difference(stack, turn.losses, PLAIN, expected)
        for stack, turns in ((OURS, ours), (PLAIN, plain))
        for turn in turns
    ]
    cells = [
        Cell(stack=stack, case=CASE, seconds=[second for turn in turns for second in turn.seconds[warm_up:]])
        for stack, turns in ((OURS, ours), (PLAIN, plain))
    ]
    return Training(
        cells=cells,
        model=in_words(config.model),
        parameters=sum(unit.numel for unit in units_of(config.model, config.sharing)),
        threads=child.THREADS,
        sequences=config.batch.sequences,
        sequence_length=config.model.sequence_length,
        steps=len(expected),
        first_loss=expected[0],
        last_loss=expected[-1],
        apart=max(apart),
        waited=[sum(turn.waited) / sum(turn.seconds) for turn in ours],
    )
