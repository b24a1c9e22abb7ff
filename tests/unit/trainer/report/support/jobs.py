"""Files of a job made by hand: lines of metrics, entries of a history, a folder on disk."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.report.job import Job, jobs_of
from pseudoreal_trainer.report.reading import JobFiles
from pseudoreal_trainer.report.steps import read_steps
from pseudoreal_trainer.runtime.history import HISTORY, HistoryEntry

NOON = 1_780_000_000.0
"""Time of the first entry, in seconds since the epoch."""


def line(step: int, phase: str = "pseudo", **fields: Any) -> bytes:
    """Return a line of metrics.jsonl; a process starts with step 1, and a step takes a second."""
    known = {
        "phase": phase,
        "step": step,
        "total_steps": 100,
        "tokens": 96 * step,
        "loss": 5.0 / step,
        "learning_rate": 0.01,
        "tokens_per_second": 96.0,
        "seconds": float(step),
        "remaining_seconds": 0.0,
        "global_cursor": step,
        "waits": {"data": 0.1 * step, "reductions": 0.2 * step, "updates": 0.0},
        "gradient_norm": 1.0,
        "host_bytes": 1 << 28,
    }
    return json.dumps(known | fields).encode()


def entry(event: Any, seconds: float, phase: str = "pseudo", **fields: Any) -> HistoryEntry:
    """Return an entry of the history, `seconds` after `NOON`."""
    known = {"stage": "train", "execution": 1, "pod": "tiny-0", "node": "gpu-0"}
    return HistoryEntry(event=event, time=NOON + seconds, phase=phase, **(known | fields))  # type: ignore[arg-type]


def started(config: PhaseConfig, seconds: float, step: int = 0, **fields: Any) -> HistoryEntry:
    return entry("Started", seconds, config.phase, step=step, config=config.to_dict(), **fields)


def job(
    lines: Iterable[bytes],
    heads: Sequence[Head] = (),
    history: Sequence[HistoryEntry] = (),
    folder: str = "runs/tiny",
    notices: Sequence[str] = (),
) -> Job:
    return jobs_of([JobFiles(folder, read_steps(lines), heads, history, [*notices])])[0]


def write_folder(folder: Path, lines: Iterable[bytes], history: Sequence[HistoryEntry] = ()) -> None:
    """Write the work directory of a job without checkpoints."""
    (folder / HISTORY).mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(each + b"\n" for each in lines))
    for number, each in enumerate(history):
        (folder / HISTORY / f"{number:020d}.json").write_text(each.to_json())
