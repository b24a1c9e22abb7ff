"""Train a link of a chain with the trainer's own phases and transitions, and measure the loss of a decay."""

import json
import logging
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

import numpy as np
import structlog
from numpy.typing import NDArray
from pseudoreal_api.names import work_directory
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config, phase_config
from pseudoreal_trainer.data.tokens.native import native_files
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.storage.durable import write_atomically
from pydantic import BaseModel, ConfigDict

from benchmarks.method.chain import NAME, Link
from tests.support.processes import Forked, preload

if TYPE_CHECKING:
    import torch
    from pseudoreal_trainer.model.reference import Transformer

preload("tests.support.warm")

_RECORD = "trained.json"
_MOST_SECONDS = 24 * 3600.0
_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16_384}
"""Validation tokens in one forward pass."""
_MOST_TOKENS = 4 << 20
"""Of a larger validation text, windows at equal distances with about so many tokens are measured."""


class Trained(BaseModel):
    """Record of a trained link, beside its checkpoints."""

    # As pydantic would write the loss of a diverged decay, it would read as that of a trunk's link.
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    steps: int
    seconds_per_step: float
    """Median of the last phase's steps."""
    peak_bytes: int
    """Largest growth of a process's resident memory in a phase."""
    loss: float | None = None
    """Validation loss in nats per token; None for a link of the trunk, NaN after a divergence."""
    validation_tokens: int = 0
    device: str = "cpu"
    has_diverged: bool = False
    """True if a loss or a gradient of the link, or of a link before it, was not finite."""


@dataclass(frozen=True)
class Place:
    scratch: Path
    """Folder with the folders of all links."""
    texts: Path
    """Folder with a folder of tokens for each text."""
    device: Literal["cpu", "cuda"] = "cpu"
    threads: int = 1

    def folder(self, link: Link) -> Path:
        return Path(work_directory(str(self.scratch), NAME, link.key))

    def data(self, link: Link) -> str:
        return str(self.texts / link.run.text)

    def known(self, link: Link) -> Trained | None:
        record = self.folder(link) / _RECORD
        return Trained.model_validate_json(record.read_bytes()) if record.exists() else None


def train(link: Link, place: Place) -> Trained:
    """Train the link; its parent is trained. A link that was interrupted begins again from its parent."""
    folder = place.folder(link)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    parent = None if link.parent is None else place.known(link.parent)
    if parent is not None and parent.has_diverged:
        _write(_diverged(link, parent.device), folder)
    else:
        process = Forked(_train, link, place)
        if code := process.wait(_MOST_SECONDS):
            raise RuntimeError(
                f"{link.run.label}, step {link.end}, in {folder} ended with exit code {code}: {process.log.read_text()}"
            )
    found = place.known(link)
    assert found is not None, "the process has written the record"
    return found


def _write(record: Trained, folder: Path) -> None:
    # The record says that the link is complete, so half of one must never be seen.
    write_atomically(folder / _RECORD, record.model_dump_json())


def _diverged(link: Link, device: str) -> Trained:
    loss = None if link.decay_from is None else math.nan
    return Trained(steps=0, seconds_per_step=0.0, peak_bytes=0, loss=loss, device=device, has_diverged=True)


def quiet() -> None:
    """Log only errors in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))


def _train(link: Link, place: Place) -> None:
    import torch
    from pseudoreal_trainer.engine.gradients import REMEDY
    from pseudoreal_trainer.errors import TrainingError

    from benchmarks.gpu.machine import first_device

    quiet()
    torch.set_num_threads(place.threads)
    folder, device = place.folder(link), first_device(place.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    has_ties = any(stage.ties for stage in link.run.arm.stages)
    try:
        record = _trained_plainly(link, place) if has_ties else _trained(link, place.data(link), folder, device)
        record = record.model_copy(update={"device": name})
    except TrainingError as error:
        if not str(error).endswith(REMEDY):
            raise
        record = _diverged(link, name)
    _write(record, folder)


def _trained(link: Link, data: str, folder: Path, device: "torch.device") -> Trained:
    """Train all phases of the link in this process. Raises TrainingError."""
    from pseudoreal_trainer.checkpoint.delink import delink
    from pseudoreal_trainer.data.token_corpus import open_corpus
    from pseudoreal_trainer.engine.ranks.ranks import Ranks
    from pseudoreal_trainer.training import validation
    from pseudoreal_trainer.training.phase import train_phase

    # The text that the trainer writes after a phase would take longer than a short link.
    validation.SAMPLE_TOKENS = 1
    job = link.job(data)
    peaks: list[int] = []
    for index in range(len(link.stages)):
        if index:
            delink(delink_config(job, index, execution=1, work_directory=str(folder)))
        config = phase_config(
            job, index, execution=1, work_directory=str(folder), offload_directory=str(folder / "offload")
        )
        with _peak_bytes(device, peaks):
            message = train_phase(config, open_corpus(config), Ranks(0, 1, device), lambda: False)
        assert message.outcome == "Succeeded", "the phase succeeds, because `stop` is never true"
    loss, tokens = (None, 0) if link.decay_from is None else _validation_loss(_checkpointed(config), config, device)
    seconds = _seconds_of_steps(folder, link.stages[-1].name)
    return Trained(
        steps=len(seconds) + 1,
        seconds_per_step=median(seconds) if seconds else 0.0,
        peak_bytes=max(peaks),
        loss=loss,
        validation_tokens=tokens,
    )


def _trained_plainly(link: Link, place: Place) -> Trained:
    """Train an arm whose sharing no job has, on the CPU."""
    import torch

    from benchmarks.method.plain import train_plainly

    parent, cpu = None if link.parent is None else place.folder(link.parent), torch.device("cpu")
    peaks: list[int] = []
    with _peak_bytes(cpu, peaks):
        model, config, seconds = train_plainly(link, place.data(link), place.folder(link), parent)
    loss, tokens = (None, 0) if link.decay_from is None else _validation_loss(model, config, cpu)
    return Trained(
        steps=len(seconds), seconds_per_step=median(seconds), peak_bytes=max(peaks), loss=loss, validation_tokens=tokens
    )


@contextmanager
def _peak_bytes(device: "torch.device", peaks: list[int]) -> Iterator[None]:
    """Append the peak of the device's memory during the context: of torch on a GPU, else growth of this process."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield
        peaks.append(torch.cuda.max_memory_allocated(device))
        return
    # Reset the kernel's peak memory counter (proc(5), clear_refs).
    Path("/proc/self/clear_refs").write_text("5")
    begin = _status("VmRSS")
    yield
    peaks.append(_status("VmHWM") - begin)


def _seconds_of_steps(folder: Path, phase: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == phase]
    return [after["seconds"] - before["seconds"] for before, after in pairwise(lines)]


def _checkpointed(config: PhaseConfig) -> "Transformer":
    """Return the reference model with the weights of the phase's newest checkpoint."""
    from pseudoreal_trainer.checkpoint.store import store_of
    from pseudoreal_trainer.model.reference import Transformer
    from pseudoreal_trainer.training.start import load_weights

    store = store_of(config)
    manifest = store.whole(store.committed(config.phase)[-1])
    model = Transformer(manifest.model, manifest.sharing)
    load_weights(model, store.reader(manifest))
    return model


def _validation_loss(model: "Transformer", config: PhaseConfig, device: "torch.device") -> tuple[float, int]:
    """Return the mean loss in nats per token over the validation text, and its tokens.

    Computed by the reference model, many windows at a time; the engine measures one window at a time.
    """
    import torch
    from torch.nn.functional import cross_entropy

    model.to(device)
    sequence = config.model.sequence_length
    files = config.data.validation.sets[0].path
    assert files is not None, "`Link.spec` names the validation set's folder"
    windows = torch.from_numpy(validation_windows(Path(files), sequence))
    total = torch.zeros((), dtype=torch.float64)
    with torch.inference_mode():
        for batch in windows.split(max(1, _TOKENS_AT_ONCE[device.type] // sequence)):
            tokens = batch.to(device, torch.int64)
            logits = model(tokens[:, :-1])
            total += cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").double().cpu()
    count = windows[:, 1:].numel()
    return float(total) / count, count


def validation_windows(folder: Path, sequence: int) -> NDArray[np.int32]:
    """Return the windows of a folder of native token files, [W, sequence + 1], or some of a large text. Neighbours in
    the text share a token."""
    files = native_files(folder)
    assert files.vocabulary is not None, "native files state their vocabulary"
    reader = TokenReader(files, files.vocabulary)
    windows = (reader.tokens - 1) // sequence
    every = math.ceil(windows * sequence / _MOST_TOKENS)
    try:
        return reader.windows(np.arange(0, windows, every, dtype=np.int64) * sequence, sequence + 1)
    finally:
        reader.close()


def _status(key: str) -> int:
    """Return a byte count of /proc/self/status."""
    found = re.search(rf"{key}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux has this key in /proc/self/status"
    return int(found[1]) << 10
