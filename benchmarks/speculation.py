"""Compare the steps of one rank whose updates wait for the norm with steps whose updates are speculative: `python -m
benchmarks.speculation`.

Passes have one core and updates another one. All stacks take turns, step by step, so that other load on the machine
affects all of them. Prints the median seconds of a step, relative to the passes alone.
"""

import os
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_trainer.engine.engine import Engine
from pseudoreal_trainer.engine.gradients import ReductionThread
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.engine.state.memory import MemoryState
from pseudoreal_trainer.plan.layout import Layout

from benchmarks.environment import ENVIRONMENT
from benchmarks.quiet import quiet_machine
from benchmarks.stacks.ours import layout_of, make_engine, train_step
from benchmarks.work import Work, noisy_sequences

_WARM_UP, _TIMED = 2, 7
_LAYERS, _HIDDEN = 8, 768
_TOKENS = (16, 32, 64, 128)
"""Tokens of a step. The fewer, the longer updates take relative to passes."""
_STACKS = ("waits for the norm", "speculates", "no clipping")


def _work(tokens: int) -> Work:
    model = Model(
        layers=_LAYERS,
        hidden_size=_HIDDEN,
        attention=Attention(heads=_HIDDEN // 64),
        sequence_length=tokens,
        feed_forward=FeedForward(size=4 * _HIDDEN),
    )
    return Work(model, 7, noisy_sequences(_WARM_UP + _TIMED, 1, tokens + 1, seed=7), 1, recompute=True)


def _layout(stack: str, work: Work) -> Layout:
    layout = layout_of(work, 1, "Host", 2)
    if stack == "no clipping":
        return layout
    return replace(layout, clipping="Global", speculates=stack != "waits for the norm")


def _seconds(engine: Engine, work: Work, step: int) -> float:
    begin = time.perf_counter()
    train_step(engine, work, step)
    return time.perf_counter() - begin


def compare(tokens: int, folder: Path) -> dict[str, float]:
    """Return stack -> median seconds of a step; also of passes without updates, and of updates without passes."""
    work, ranks = _work(tokens), Ranks(0, 1, torch.device("cpu"))
    engines = {stack: make_engine(work, ranks, _layout(stack, work), folder / stack) for stack in _STACKS}
    found: dict[str, list[float]] = {stack: [] for stack in (*_STACKS, "passes", "updates")}
    for step in range(len(work.batches)):
        for stack, engine in engines.items():
            # No step is clipped, whatever its norm is: after a clipped step none speculates.
            with patch.object(ReductionThread, "_factor_for", lambda *_: 1.0):
                # Two steps in a row: the second one starts while updates of the first one are running, as in training.
                _seconds(engine, work, step)
                found[stack].append(_seconds(engine, work, step))
                engine.state.wait_for_updates()
        passing = engines["no clipping"]
        with patch.object(MemoryState, "update", lambda self, *_: self.drop_gradient()):
            found["passes"].append(_seconds(passing, work, step))
        found["updates"].append(_update_seconds(passing, work, step))
    for engine in engines.values():
        engine.close()
    return {stack: median(seconds[_WARM_UP:]) for stack, seconds in found.items()}


def _update_seconds(engine: Engine, work: Work, step: int) -> float:
    """Return the seconds of all updates of a step together."""
    seconds, update = list[float](), MemoryState.update

    def timed(self: MemoryState, *arguments: Any) -> None:
        begin = time.perf_counter()
        update(self, *arguments)
        seconds.append(time.perf_counter() - begin)

    with patch.object(MemoryState, "update", timed):
        train_step(engine, work, step)
        engine.state.wait_for_updates()
    return sum(seconds)


def main() -> None:
    os.environ |= ENVIRONMENT
    torch.set_num_threads(1)
    with quiet_machine():
        print(f"| tokens | {' | '.join(('updates', *_STACKS))} | speculation gains |")
        for tokens in _TOKENS:
            with TemporaryDirectory() as folder:
                found = compare(tokens, Path(folder))
            ratios = [f"{found[stack] / found['passes']:.2f}" for stack in ("updates", *_STACKS)]
            gain = found["waits for the norm"] / found["speculates"]
            print(f"| {tokens} | {' | '.join(ratios)} | {gain:.2f}× |", flush=True)


if __name__ == "__main__":
    main()
