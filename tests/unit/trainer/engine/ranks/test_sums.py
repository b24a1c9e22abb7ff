"""Sums over a group of ranks: where gradients are added up, and in which order small sums are asked for."""

from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from pseudoreal_trainer.engine.ranks.sums import sum_by_parts, sums_of
from torch import Tensor

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_a_gradient_of_the_host_is_summed_on_the_network_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part by part: there, summed, and back."""
    parts = [Mock(), Mock()]
    gradient, group, summed = Mock(device=CPU), Mock(), []
    gradient.split.return_value = parts
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: summed.append((tensor, group)))
    sum_by_parts(gradient, GPU, group)
    assert summed == [(part.to.return_value, group) for part in parts]
    for part in parts:
        part.to.assert_called_once_with(GPU)
        part.copy_.assert_called_once_with(part.to.return_value)


def test_a_gradient_of_the_device_is_summed_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gradient, group, summed = torch.ones(8), Mock(), []
    monkeypatch.setattr(
        dist, "all_reduce", lambda tensor, group: summed.append((tensor.data_ptr(), len(tensor), group))
    )
    sum_by_parts(gradient, CPU, group)
    assert summed == [(gradient.data_ptr(), 8, group)]


def test_sums_of_several_lists_are_under_way_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty list needs none. Each is a collective of its own, as the order of sums depends on what is summed."""
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
