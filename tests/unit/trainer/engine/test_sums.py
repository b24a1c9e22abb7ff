"""Sums over a group of ranks: the order in which small sums are launched."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.gradients import sums_of
from torch import Tensor

CPU = torch.device("cpu")


def test_sums_of_several_lists_are_in_flight_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list needs no sum. Each list is a collective of its own, because the order of summation depends on the
    content of a collective."""
    asked: list[Any] = []

    def all_reduce(values: Tensor, **_: object) -> Mock:
        asked.append(values.tolist())
        values *= 2
        return Mock(wait=lambda: asked.append("wait"))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    lists = [[1.0, 2.0], [], [3.0]]
    assert sums_of(lists, CPU, Mock()) == [[2.0, 4.0], [], [6.0]]
    assert asked == [[1.0, 2.0], [3.0], "wait", "wait"]
    assert sums_of(lists, CPU, None) == lists
