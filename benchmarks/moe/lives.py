"""Train a phase in a process of its own, with the trainer's own loop, and keep its losses and step times."""

import json
import logging
import re
from itertools import pairwise
from pathlib import Path

import structlog
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pydantic import BaseModel

from tests.support.processes import Forked, preload

preload("tests.support.warm")

CORPUS = Path("examples/corpus/kjv")
_MOST_SECONDS = 24 * 3600.0


class Point(BaseModel, frozen=True):
    """A validation."""

    step: int
    tokens: int
    loss: float
    """Nats per token."""


class PhaseLife(BaseModel, frozen=True):
    name: str
    first_step: int
    steps: int
    seconds_per_step: float
    """Median."""
    peak_bytes: int
    """Peak growth of the resident memory during the phase, in bytes."""
    points: list[Point]


class Life(BaseModel, frozen=True):
    experiment: str
    seed: int
    phases: list[PhaseLife]
    date: str = "an unknown day"
    commit: str = "an unknown commit"
    """Commit that trained the experiment."""

    @property
    def final_loss(self) -> float:
        return self.phases[-1].points[-1].loss


def quiet() -> None:
    """Log only errors in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def live_phase(body: PseudoRealJob, index: int, work: Path) -> PhaseLife:
    work.mkdir(parents=True, exist_ok=True)
    config = phase_config(
        body, index, execution=1, work_directory=str(work), offload_directory=str(work.resolve() / "offload")
    )
    if code := Forked(_train, config).wait(_MOST_SECONDS):
        raise RuntimeError(f"the phase {config.phase} in {work} ended with exit code {code}")
    return PhaseLife.model_validate_json((work / "life.json").read_bytes())


def _train(config: PhaseConfig) -> None:
    import torch
    from pseudoreal_trainer.data.corpus import load_corpus
    from pseudoreal_trainer.engine.ranks.ranks import Ranks
    from pseudoreal_trainer.training.phase import train_phase

    quiet()
    torch.set_num_threads(1)
    # Reset the kernel's peak memory counter (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    begin = _status("VmRSS")
    corpus = load_corpus(config.data, config.model.sequence_length)
    message = train_phase(config, corpus, Ranks(0, 1, torch.device("cpu")), lambda: False)
    assert message.outcome == "Succeeded", "the phase succeeds, because `stop` is never true"
    found = _life(config, _status("VmHWM") - begin)
    (Path(config.work_directory) / "life.json").write_text(found.model_dump_json())


def _status(key: str) -> int:
    """Return a byte count of /proc/self/status."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux has this key in /proc/self/status"
    return int(found[1]) << 10


def _life(config: PhaseConfig, peak_bytes: int) -> PhaseLife:
    lines = [json.loads(line) for line in (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == config.phase]
    seconds = sorted(after["seconds"] - before["seconds"] for before, after in pairwise(lines))
    return PhaseLife(
        name=config.phase,
        first_step=lines[0]["step"],
        steps=len(lines),
        seconds_per_step=seconds[len(seconds) // 2],
        peak_bytes=peak_bytes,
        points=[
            Point(step=line["step"], tokens=line["tokens"], loss=line["validation_loss"])
            for line in lines
            if line["validation_loss"]
        ],
    )
