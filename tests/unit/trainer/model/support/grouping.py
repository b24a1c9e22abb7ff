"""Checks for every kind of experts: one host read per pass, and equal results grouped and one by one."""

from collections.abc import Callable

import pytest
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model import grouped
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.modules import UnitModule
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor

from tests.unit.trainer.model.support.waiting import HostReads, Waits

Mixed = Callable[[Block, Tensor], Tensor]
"""Output of a block's experts, [B, T, H] -> [B, T, H]."""
_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def assert_waits_once(mixed: Mixed, block: Block, hidden: Tensor) -> None:
    with HostReads() as reads, Waits() as waits:
        out = mixed(block, hidden.requires_grad_())
    assert (reads.found, waits.found) == (["tolist"], [])
    with HostReads() as reads, Waits() as waits:
        out.sum().backward()
    assert (reads.found, waits.found) == ([], []), "the backward pass reads nothing on the host"


def assert_groups_compute_the_same(mixed: Mixed, spec: Model, hidden: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare grouped with sequential experts. As in the engine, the parameters of a unit are views of one vector.
    `hidden` has the compute dtype."""
    block, found = _bound_block(spec, hidden.dtype), []
    for is_grouped in (False, True):
        monkeypatch.setattr(grouped, "can_group", lambda *_, is_grouped=is_grouped: is_grouped)
        source = hidden.clone().requires_grad_()
        out = mixed(block, source)
        parameters = [p for n, p in block.named_parameters() if n.startswith(("router.", "experts."))]
        found.append([out, *torch.autograd.grad(out.square().sum(), [source, *parameters])])
    tolerance = _TOLERANCES[hidden.dtype]
    for one_by_one, together in zip(*found, strict=True):
        most = one_by_one.abs().max().item()
        torch.testing.assert_close(together, one_by_one, rtol=tolerance, atol=tolerance * most)


def _bound_block(spec: Model, dtype: torch.dtype) -> Block:
    with torch.device("meta"):
        block = Block(spec)
    generator = torch.Generator().manual_seed(3)
    for unit in units_of(spec, Sharing(blocks=1))[1:-1]:
        UnitModule(block, unit).bind(torch.randn(unit.numel, generator=generator).mul_(0.3).to(dtype))
    return block
