"""Top-k experts against those of transformers."""

from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import Model, TopK
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.experts import RouterStatistics, RoutingDecision
from pseudoreal_trainer.model.top_k import TopKExperts
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.model.support.grouping import assert_groups_compute_the_same, assert_waits_once
from tests.unit.trainer.model.support.widened import widened

HIDDEN, INNER, LENGTH = 16, 24, 10


def _spec(count: int = 6, **top_k: Any) -> Model:
    return Model.model_validate(
        {
            "layers": 1,
            "hiddenSize": HIDDEN,
            "attention": {"heads": 2},
            "sequenceLength": LENGTH,
            "feedForward": {"size": 48, "activation": "SwiGLU"},
            "experts": {"type": "TopK", "count": count, "topK": {"perToken": 3, "size": INNER, **top_k}},
        }
    )


def _block(spec: Model) -> Block:
    block = Block(spec).double()
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.7, generator=generator)
    return block


def _features() -> Tensor:
    """Return random features, [B, T, H]."""
    return torch.randn(3, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def _deepseek(block: Block) -> nn.Module:
    """Return transformers' DeepSeek V3 experts with one group and the weights of `block`."""
    from transformers import DeepseekV3Config

    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
        "n_routed_experts": 6,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "experts_implementation": "eager",
    }
    config = DeepseekV3Config(**fields)
    theirs: nn.Module = widened("models.deepseek_v3.modeling_deepseek_v3").DeepseekV3MoE(config).double()
    experts: Any = block.experts
    state = {
        "gate.weight": block.router.weight,
        "experts.gate_up_proj": torch.cat([experts.gate.weight, experts.up.weight], dim=1),
        "experts.down_proj": experts.down.weight,
    }
    shared: Any = block.shared
    state |= {f"shared_experts.{n}_proj.weight": getattr(shared, n).weight for n in ("gate", "up", "down")}
    bias: Any = block.experts.balancing_bias
    state |= {name: torch.zeros(6) if bias is None else bias for name, _ in theirs.named_buffers()}
    theirs.load_state_dict({name: value.detach() for name, value in state.items()}, strict=True)
    return theirs


@pytest.mark.parametrize("balance", [{}, {"biasUpdateRate": "0.1"}], ids=["no bias", "a bias"])
def test_scores_of_their_own_with_shared_experts_are_those_of_deepseek(balance: Any) -> None:
    block = _block(_spec(score="Sigmoid", scale="2.5", sharedExperts=2, **balance))
    theirs = _deepseek(block)
    results = []
    for compute in (block._mix_experts, theirs):
        hidden = _features().requires_grad_()
        out = compute(hidden)
        (out * torch.arange(HIDDEN)).sum().backward()
        results.append((out.detach(), hidden.grad))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    gate: Any = theirs.get_parameter("gate.weight")
    torch.testing.assert_close(block.router.weight.grad, gate.grad, rtol=0, atol=1e-12)
    both: Any = theirs.get_parameter("experts.gate_up_proj").grad
    gradients: list[Any] = [block.experts.get_parameter(name).grad for name in ("gate.weight", "up.weight")]
    torch.testing.assert_close(torch.cat(gradients, dim=1), both, rtol=0, atol=1e-12)


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    block = _block(_spec(count=40))
    parameters = [p for n, p in block.named_parameters() if n.startswith("experts.")]
    gradients = torch.autograd.grad(block._mix_experts(_features()[:1, :4]).sum(), parameters)
    assert sum(not of_one.any() for gradient in gradients for of_one in gradient) >= 3 * (40 - 3 * 4)


def test_rows_of_choices_are_made_without_copies_of_all_tokens() -> None:
    """Each row is selected from the tokens themselves. The gradients of a token's rows are added up in the order of its
    choices, so the sum is the same in every run on a GPU, too."""
    experts, generator = _block(_spec()).experts, torch.Generator().manual_seed(7)
    chosen = torch.tensor([[2, 0, 5], [0, 1, 2], [5, 2, 0], [1, 3, 2]])
    order = chosen.flatten().argsort(stable=True)
    decision = RoutingDecision(chosen, None, order, torch.bincount(chosen.flatten(), minlength=6))
    tokens = torch.randn(4, HIDDEN, generator=generator).requires_grad_()
    with Sizes() as sizes:
        rows = experts.rows(tokens, decision, [])
    assert torch.equal(rows, tokens[[number for number, _ in _pairs(chosen)]])
    assert sizes.found == [rows.numel()], "the rows are the only tensor of their size"
    gradient = torch.randn(12, HIDDEN, generator=generator)
    (found,) = torch.autograd.grad(rows, tokens, gradient)
    by_choice = {(number, expert): row for (number, expert), row in zip(_pairs(chosen), gradient, strict=True)}
    for number, experts_of_one in enumerate(chosen.tolist()):
        total = torch.zeros(HIDDEN)
        for expert in experts_of_one:
            total = total + by_choice[number, expert]
        assert torch.equal(found[number], total)


def _pairs(chosen: Tensor) -> list[tuple[int, int]]:
    """Return (token, expert) of each row: the tokens of expert 0, then of expert 1, ..."""
    return [(number, expert) for expert in range(6) for number in range(4) if expert in chosen[number].tolist()]


class Sizes(TorchDispatchMode):
    """Collects the sizes of results with as many features as a token."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.shape[-1:] == (HIDDEN,):
            self.found.append(out.numel())
        return out


def test_a_pass_waits_for_the_device_once() -> None:
    assert_waits_once(Block._mix_experts, _block(_spec(sharedExperts=1)), _features())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_groups_are_those_one_by_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_groups_compute_the_same(Block._mix_experts, _spec(), _features().to(dtype), monkeypatch)


@pytest.mark.processor
def test_a_bias_chooses_experts_and_weighs_none() -> None:
    block = _block(_spec(score="Sigmoid", biasUpdateRate="0.1"))
    bias: Any = block.experts.balancing_bias
    bias.data = torch.tensor([9.0, 0, 9, 0, 0, 9]).double()
    statistics = RouterStatistics.empty(6, 1, torch.device("cpu"))
    (sums,) = torch.autograd.grad(block._mix_experts(_features(), statistics).sum(), [statistics.sums])
    assert sums[:7].tolist() == [3 * LENGTH, 0, 3 * LENGTH, 0, 0, 3 * LENGTH, 0]
    assert float(sums[-1]) == 0
    shifted = block._mix_experts(_features())
    bias.data += 5
    assert torch.equal(block._mix_experts(_features()), shifted)


@pytest.mark.parametrize("score", ["Softmax", "Sigmoid"])
def test_the_auxiliary_loss_is_that_of_each_sequence(score: str) -> None:
    """The loss is added to the loss over the batch's tokens, and its value is reported in the router statistics."""
    spec, found = _spec(score=score, auxiliaryLoss="0.3", biasUpdateRate="0.1"), []
    for is_plain in (False, True):
        block, hidden = _block(spec), _features().requires_grad_()
        sources = [hidden, block.router.weight]
        statistics = RouterStatistics.empty(6, 30, torch.device("cpu"))
        if is_plain:
            out, loss = block._mix_experts(hidden), _auxiliary_loss(score, block.router(hidden))
            found.append([*torch.autograd.grad(out.sum() + loss / 30, sources), loss])
        else:
            *gradients, sums = torch.autograd.grad(
                block._mix_experts(hidden, statistics).sum(), [*sources, statistics.sums]
            )
            found.append([*gradients, sums[-1]])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_the_z_loss_pulls_the_logarithm_of_the_sum_to_zero() -> None:
    """The gradient by a logit z is 2 log(sum) exp(z) / sum. The output's gradient is zero here, so nothing else adds to
    it."""
    block, statistics = _block(_spec(routerZLoss="0.3")), RouterStatistics.empty(6, 30, torch.device("cpu"))
    logits = block.router(_features()).detach().requires_grad_()
    out = block.experts(_features(), logits, statistics)
    gradient, sums = torch.autograd.grad(out, [logits, statistics.sums], torch.zeros_like(out))
    logarithms = logits.detach().exp().sum(dim=-1, keepdim=True).log()
    torch.testing.assert_close(
        gradient, 0.3 / 30 * 2 * logarithms * logits.detach().softmax(dim=-1), rtol=1e-12, atol=0
    )
    assert float(sums[-1]) == pytest.approx(0.3 * float(logarithms.square().sum()), rel=1e-13)


def _auxiliary_loss(score: str, logits: Tensor) -> Tensor:
    """Return the auxiliary loss with factor 0.3, summed over tokens; logits [B, T, 6] -> scalar."""
    total = torch.zeros(())
    for sequence in logits:
        scores = sequence.softmax(dim=-1) if score == "Softmax" else sequence.sigmoid()
        chosen = torch.stack([token.sort(descending=True).indices[:3] for token in scores])
        frequencies = [6 / (3 * LENGTH) * (chosen == expert).double().sum() for expert in range(6)]
        means = (scores / scores.sum(dim=1, keepdim=True)).mean(dim=0)
        total = total + 0.3 * LENGTH * sum(f * p for f, p in zip(frequencies, means, strict=True))
    return total


def test_experts_in_balance_have_an_auxiliary_loss_of_its_factor() -> None:
    """Sequences of 10 tokens, 5 experts and 2 choices per token: each expert gets 4 tokens, with nearly
    equal scores."""
    experts = TopKExperts(_spec(), TopK(per_token=2, auxiliary_loss="0.5"), 5)
    logits = torch.zeros(1, 10, 5, dtype=torch.float64)
    for token in range(10):
        logits[0, token, [token % 5, (token + 1) % 5]] = 1e-12
    assert float(experts._sequence_loss(logits.softmax(dim=-1))) == pytest.approx(10 * 0.5, rel=1e-11)


def test_tokens_are_counted_exactly_in_bfloat16() -> None:
    """bfloat16 has no odd numbers above 256."""
    torch.manual_seed(0)
    block = Block(_spec(biasUpdateRate="0.1")).bfloat16()
    hidden = torch.randn(2, 1001, HIDDEN, dtype=torch.bfloat16)
    statistics = RouterStatistics.empty(6, 1, torch.device("cpu"))
    (sums,) = torch.autograd.grad(block._mix_experts(hidden, statistics).sum(), [statistics.sums])
    assert int(sums[:6].sum()) == 3 * 2002
    chosen = block.router(hidden).softmax(dim=-1).flatten(0, 1).argsort(dim=-1, descending=True)[:, :3]
    assert sums[:6].tolist() == [int((chosen == expert).sum()) for expert in range(6)]
