"""A source keeps the sample order in which it was started, even if its files move to another kind of storage."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.data.block_order import BlockOrder
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.data.sources import Source
from pseudoreal_trainer.data.token_corpus import TokenCorpus
from pseudoreal_trainer.data.tokens.reader import TokenReader
from pseudoreal_trainer.data.tokens.runs import Run, TokenFiles
from pseudoreal_trainer.engine.ranks.process_groups import ProcessGroups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.memory.from_config import phase_layout
from pseudoreal_trainer.training.data_source import open_data_source
from pseudoreal_trainer.training.progress import Progress

T, TOKENS = 16, 1000
ORDER = BlockOrder(windows=4, group=3)
IDENTITY = CorpusIdentity(files=1, size=2 * TOKENS, sha256="07" * 32)

Read = Callable[[BlockOrder | None, Progress, int], tuple[NDArray[Any], Manifest]]


@pytest.fixture
def read(job_body: Any, config: Any, tmp_path: Path) -> Read:
    """Return a function that reads steps of 6 samples and returns their first tokens and the manifest afterwards.

    `order` is the order that the source's storage suggests; a checkpoint's order takes precedence.
    """
    np.arange(TOKENS, dtype="<u2").tofile(tmp_path / "tokens")
    sources, sets = [{"name": "web"}], [{"name": "wiki"}]
    job_body["spec"]["data"] = {"path": str(tmp_path), "sources": sources, "validation": {"sets": sets}}
    phase = config(0)
    files = TokenFiles((Run(tmp_path / "tokens", 0, np.dtype("<u2"), TOKENS),), ())

    def run(order: BlockOrder | None, progress: Progress, steps: int) -> tuple[NDArray[Any], Manifest]:
        source = Source("web", TokenReader(files, 2**16), T, phase.data.seed, order)
        corpus = TokenCorpus({"web": source}, {}, None, IDENTITY)
        groups = ProcessGroups(phase_layout(phase, "cpu"), Ranks(0, 1, torch.device("cpu")))
        found = []
        with open_data_source(phase, corpus, progress, groups) as reading:
            for _ in range(steps):
                begin = progress.cursor
                found += [reading.samples.windows(first, first + 3)[:, 0] for first in (begin, begin + 3)]
                progress.cursor, progress.step = begin + 6, progress.step + 1
            progress.consumed = reading.consumed(progress.cursor)
        return np.concatenate(found), progress.manifest(phase, IDENTITY)

    return run


def test_the_order_of_a_source_is_recorded_in_the_checkpoint_and_kept(read: Read) -> None:
    whole, _ = read(ORDER, Progress(), 5)
    first, manifest = read(ORDER, Progress(), 2)
    assert manifest.random.blocks == {"web": ORDER}
    # The files were copied to a disk, which suggests no block order.
    rest, manifest = read(None, Progress.saved_in(manifest), 3)
    assert np.concatenate([first, rest]).tolist() == whole.tolist()
    assert manifest.random.blocks == {"web": ORDER}


def test_a_source_started_on_a_disk_keeps_its_order(read: Read) -> None:
    """The same holds for checkpoints of releases that did not know block orders."""
    whole, _ = read(None, Progress(), 5)
    first, manifest = read(None, Progress(), 2)
    assert "blocks" not in manifest.random.to_json()
    rest, manifest = read(ORDER, Progress.saved_in(manifest), 3)
    assert np.concatenate([first, rest]).tolist() == whole.tolist()
    assert manifest.random.blocks is None


def test_the_two_orders_differ(read: Read) -> None:
    assert read(None, Progress(), 2)[0].tolist() != read(ORDER, Progress(), 2)[0].tolist()
