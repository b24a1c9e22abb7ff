from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_trainer.checkpoint import Checkpoint, CheckpointStore
from pseudoreal_trainer.delink import delink, delinked
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.model import Transformer
from pseudoreal_trainer.state import load_weights

TOKENS = torch.randint(256, (2, 16), generator=torch.Generator().manual_seed(1))


def _logits(checkpoint: Checkpoint) -> torch.Tensor:
    model = Transformer(checkpoint.manifest.model, checkpoint.manifest.sharing).double()
    load_weights(model, checkpoint)
    logits: torch.Tensor = model(TOKENS)
    return logits


def _source(tmp_path: Path) -> Checkpoint:
    found = CheckpointStore(tmp_path / "work", "11111111-2222").load_newest("pseudo", complete=True)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"blocks": 1}, None),
        ({"blocks": 1}, {"blocks": 2, "pattern": "segment"}),
        ({"blocks": 2, "pattern": "cycle"}, {"blocks": 4, "pattern": "cycle"}),
        ({"blocks": 2, "pattern": "segment"}, {"blocks": 4, "pattern": "segment"}),
        ({"blocks": 2, "pattern": "segment"}, None),
        ({"blocks": 2, "pattern": "cycle"}, {"blocks": 2, "pattern": "cycle"}),
    ],
)
def test_the_function_stays_the_same_to_the_bit(
    before: Any, after: Any, job_body: Any, tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    job_body["spec"]["phases"][0]["sharing"] = before
    job_body["spec"]["phases"][1]["sharing"] = after
    train(config(0))
    message = delink(delink_of(1))
    source = _source(tmp_path)
    target = CheckpointStore(tmp_path / "work", "11111111-2222").load_newest("real")
    assert target is not None
    assert message.checkpoint == target.manifest.name == "real-00000006"
    assert target.manifest.parent == "pseudo-00000006"
    assert target.manifest.sharing.blocks == (after or {"blocks": 4})["blocks"]
    assert torch.equal(_logits(source), _logits(target))


@pytest.mark.parametrize("kind", ["copy", "scale", "reset"])
def test_moments_are_divided_by_the_uses_that_fall_away(
    kind: str, job_body: Any, tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    """4 layers on 1 block become 2 blocks: each new block has half of the uses, so n = 2."""
    job_body["spec"]["phases"][1]["sharing"] = {"blocks": 2}
    job_body["spec"]["delink"] = {"optimizerState": kind}
    train(config(0))
    before = _source(tmp_path).optimizer
    after = delinked(_source(tmp_path), delink_of(1)).optimizer
    factors = {"copy": (1, 1, 1), "scale": (1 / 2, 1 / 4, 1), "reset": (0, 0, 0)}[kind]
    for block in (0, 1):
        for moment, factor in zip(("first_moment", "second_moment", "step"), factors, strict=True):
            name = f"ffn.up.weight.{moment}"
            assert np.abs(before[f"blocks.0.{name}"]).max() > 0
            assert np.array_equal(after[f"blocks.{block}.{name}"], before[f"blocks.0.{name}"] * factor)
    for name in ("embedding.weight.first_moment", "head.weight.second_moment", "norm.weight.step"):
        assert np.array_equal(after[name], before[name])


def test_it_can_be_repeated_and_repairs_its_own_work(
    tmp_path: Path, config: Any, delink_of: Callable[..., Any], train: Any
) -> None:
    train(config(0))
    first = delink(delink_of(1))
    manifest = tmp_path / "work" / "checkpoints" / "real-00000006" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert delink(delink_of(1)) == first
    assert manifest.stat().st_mtime_ns == written, "nothing was written again"
    manifest.with_name("model.safetensors").write_bytes(b"broken")
    assert delink(delink_of(1)) == first
    store = CheckpointStore(tmp_path / "work", "11111111-2222")
    store.load(store.committed("real")[0])


def test_an_unfinished_phase_is_not_delinked(config: Any, delink_of: Any, train: Any) -> None:
    train(config(0), stop=lambda: True)
    with pytest.raises(TrainingError, match="phase pseudo has no complete checkpoint"):
        delink(delink_of(1))


def test_a_phase_without_its_delink_says_so(config: Any, train: Any) -> None:
    train(config(0))
    with pytest.raises(TrainingError, match="the delink from the phase before has not run"):
        train(config(1))
