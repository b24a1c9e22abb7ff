"""Fixtures of tests of a unit's state."""

from collections.abc import Iterator

import pytest
import torch
from pseudoreal_trainer.engine.state import memory
from pseudoreal_trainer.engine.state.memory import AdamW

from tests.unit.trainer.engine.state.support.pieces import PIECE


@pytest.fixture(params=[1, 3], ids=["one thread", "three threads"])
def optimizer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdamW]:
    """AdamW with small pieces, on one thread and on several."""
    monkeypatch.setattr(memory, "PIECE", PIECE)
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield AdamW()
    assert torch.get_num_threads() == request.param, "the workers have their own number"
    torch.set_num_threads(before)
