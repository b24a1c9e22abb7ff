"""Train a link of a chain with the trainer's own phases and transitions, and measure the loss of a decay."""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
import structlog
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from pseudoreal_api.names import work_directory
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config, phase_config
from pydantic import BaseModel

from benchmarks.method.arms import SEQUENCE
from benchmarks.method.chain import NAME, Link
from tests.support.processes import Forked, preload

preload("tests.support.warm")

_MOST_SECONDS = 6 * 3600.0
_WINDOWS_AT_ONCE = 8


class Trained(BaseModel, frozen=True):
    """Record of a trained link, beside its checkpoints."""

    steps: int
    seconds_per_step: float
    """Median of the last phase's steps."""
    peak_bytes: int
    """Largest growth of a process's resident memory in a phase."""
    loss: float | None = None
    """Validation loss in nats per token; None for a link of the trunk."""
    validation_tokens: int = 0


@dataclass(frozen=True)
class Place:
    scratch: Path
    """Folder with the folders of all links."""
    texts: Path
    """Folder with a folder of tokens for each text."""

    def folder(self, link: Link) -> Path:
        return Path(work_directory(str(self.scratch), NAME, link.key))

    def data(self, link: Link) -> str:
        return str(self.texts / link.run.text)

    def known(self, link: Link) -> Trained | None:
        record = self.folder(link) / "trained.json"
        return Trained.model_validate_json(record.read_bytes()) if record.exists() else None


def train(link: Link, place: Place) -> Trained:
    """Train the link; its parent is trained. A link that was interrupted begins again from its parent."""
    folder = place.folder(link)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    process = Forked(_train, link, place)
    if code := process.wait(_MOST_SECONDS):
        raise RuntimeError(
            f"{link.run.arm.name}, step {link.end}, in {folder} ended with exit code {code}: {process.log.read_text()}"
        )
    found = place.known(link)
    assert found is not None, "the process has written the record"
    return found


def quiet() -> None:
    """Log only errors in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _train(link: Link, place: Place) -> None:
    import torch
    from pseudoreal_trainer.checkpoint.delink import delink
    from pseudoreal_trainer.data.token_corpus import open_corpus
    from pseudoreal_trainer.engine.ranks.ranks import Ranks
    from pseudoreal_trainer.training.phase import train_phase

    quiet()
    torch.set_num_threads(1)
    folder, job = place.folder(link), link.job(place.data(link))
    peaks = []
    for index in range(len(link.stages)):
        if index:
            delink(delink_config(job, index, execution=1, work_directory=str(folder)))
        config = phase_config(
            job, index, execution=1, work_directory=str(folder), offload_directory=str(folder / "offload")
        )
        # Reset the kernel's peak memory counter (proc(5), clear_refs).
        Path("/proc/self/clear_refs").write_text("5")
        begin = _status("VmRSS")
        message = train_phase(config, open_corpus(config), Ranks(0, 1, torch.device("cpu")), lambda: False)
        assert message.outcome == "Succeeded", "the phase succeeds, because `stop` is never true"
        peaks.append(_status("VmHWM") - begin)
    loss, tokens = (None, 0) if link.decay_from is None else _validation_loss(config)
    seconds = _seconds_of_steps(folder, link.stages[-1].name)
    record = Trained(
        steps=len(seconds) + 1,
        seconds_per_step=median(seconds) if seconds else 0.0,
        peak_bytes=max(peaks),
        loss=loss,
        validation_tokens=tokens,
    )
    (folder / "trained.json").write_text(record.model_dump_json())


def _seconds_of_steps(folder: Path, phase: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == phase]
    return [after["seconds"] - before["seconds"] for before, after in pairwise(lines)]


def _validation_loss(config: PhaseConfig) -> tuple[float, int]:
    """Return the mean loss in nats per token over the validation text, and its tokens.

    Computed by the reference model, many windows at a time; the engine measures one window at a time.
    """
    import torch
    from pseudoreal_trainer.checkpoint.store import store_of
    from pseudoreal_trainer.model.reference import Transformer
    from pseudoreal_trainer.training.start import load_weights
    from torch.nn.functional import cross_entropy

    store = store_of(config)
    manifest = store.whole(store.committed(config.phase)[-1])
    model = Transformer(manifest.model, manifest.sharing)
    load_weights(model, store.reader(manifest))
    files = config.data.validation.sets[0].path
    assert files is not None, "`Link.spec` names the validation set's folder"
    windows = torch.from_numpy(_windows(Path(files)))
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode():
        for batch in windows.split(_WINDOWS_AT_ONCE):
            logits = model(batch[:, :-1])
            total += cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum").double()
    tokens = windows[:, 1:].numel()
    return float(total) / tokens, tokens


def _windows(folder: Path) -> NDArray[np.int64]:
    """Return the windows of a folder of native token files, [W, sequence + 1]; neighbours share a token."""
    tokens = np.concatenate([np.fromfile(path, np.uint16) for path in sorted(folder.glob("*.bin"))])
    return sliding_window_view(tokens, SEQUENCE + 1)[::SEQUENCE].astype(np.int64)


def _status(key: str) -> int:
    """Return a byte count of /proc/self/status."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux has this key in /proc/self/status"
    return int(found[1]) << 10
