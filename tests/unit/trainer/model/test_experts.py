"""Experts against a plain loop over tokens, in float64."""

from math import ceil, erf, exp, sqrt
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.model import FeedForward, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.experts import RouterStatistics
from pseudoreal_trainer.model.grouped import StackedFeedForward, can_group
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.model.rotary import rotary
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.trainer.model.support.grouping import assert_groups_compute_the_same, assert_waits_once

pytestmark = pytest.mark.processor

HIDDEN, INNER, LENGTH = 8, 12, 10
MIXTURES: list[dict[str, Any]] = [
    {"count": 4, "capacityFactor": "8"},
    {"count": 4, "capacityFactor": "1"},
    {"count": 6, "prototypes": 2, "capacityFactor": "0.5"},
    {"count": 6, "prototypes": 3, "capacityFactor": "0.75"},
    {"count": 3, "prototypes": 3},
    {"count": 40, "prototypes": 2},
]


def _spec(
    experts: dict[str, Any] | None, activation: str = "GELU", layers: int = 1, hidden: int = HIDDEN, inner: int = INNER
) -> Model:
    feed_forward = {"size": inner, "activation": activation}
    fields = {
        "layers": layers,
        "hiddenSize": hidden,
        "attention": {"heads": 2},
        "sequenceLength": LENGTH,
        "feedForward": feed_forward,
        "experts": experts,
    }
    return Model.model_validate(fields)


def _block(spec: Model, dtype: torch.dtype = torch.float64) -> Block:
    """Return a block with weights large enough for the gates to differ."""
    block = Block(spec).to(dtype)
    generator = torch.Generator().manual_seed(3)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.7, generator=generator)
    return block


def _features(sequences: int = 3, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return random features, [B, T, H]."""
    generator = torch.Generator().manual_seed(4)
    return torch.randn(sequences, LENGTH, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def _mixed(block: Block, hidden: Tensor) -> Tensor:
    """Return the output of the block's experts. [B, T, H] -> [B, T, H]"""
    found: Tensor = block.experts(hidden, block.router(hidden))
    return found


def _by_hand(block: Block, spec: Model, hidden: Tensor) -> tuple[Tensor, int]:
    """Return the experts' output, computed token by token, and the number of tokens that a full expert refused."""
    assert spec.experts is not None
    groups, size = spec.experts.prototypes, spec.experts.count // spec.experts.prototypes
    share = float(spec.experts.capacity_factor) * LENGTH / size
    outputs, refused = [], 0
    for sequence in hidden:
        accepted = [0] * spec.experts.count
        for token in sequence:
            total = torch.zeros(HIDDEN, dtype=torch.float64)
            for group in range(groups):
                scores = block.router.weight[group * size : (group + 1) * size] @ token
                best = max(range(size), key=scores.tolist().__getitem__)
                expert = group * size + best
                if accepted[expert] >= share:
                    refused += 1
                    continue
                accepted[expert] += 1
                made = _expert_by_hand(block.experts, expert, token)
                chance = scores[best].exp() / scores.exp().sum()
                total = total + made + (chance - chance.item()) * made.detach()
            outputs.append(total)
    return torch.stack(outputs).view_as(hidden), refused


@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_a_pass_tallies_choices_and_refusals(experts: dict[str, Any]) -> None:
    """Refused tokens are counted for their chosen expert; the plain loop counts while it computes."""
    spec = _spec(experts)
    block, hidden = _block(spec), _features()
    assert spec.experts is not None
    statistics = RouterStatistics.empty(spec.experts.count, 7, hidden.device)
    out = block.experts(hidden, block.router(hidden), statistics)
    assert torch.equal(out, _mixed(block, hidden))
    (sums,) = torch.autograd.grad(out.sum(), [statistics.sums])
    groups = block.router(hidden).detach().flatten(0, 1).unflatten(-1, (spec.experts.prototypes, -1))  # [N, P, n]
    chosen = [[int((token == expert).sum()) for expert in range(groups.shape[-1])] for token in groups.argmax(-1).t()]
    assert sums[: -RouterStatistics.OTHERS].tolist() == [count for group in chosen for count in group]
    refused, entropy, loss = sums[-RouterStatistics.OTHERS :].tolist()
    assert refused == _by_hand(block, spec, hidden)[1]
    assert entropy == pytest.approx(float(torch.distributions.Categorical(logits=groups).entropy().sum()), rel=1e-12)
    assert loss == 0


def _expert_by_hand(experts: Any, number: int, token: Tensor) -> Tensor:
    up = experts.up.weight[number] @ token
    if experts.gate is None:
        inner = up * 0.5 * (1 + torch.erf(up / sqrt(2)))
    else:
        gate = experts.gate.weight[number] @ token
        inner = gate / (1 + torch.exp(-gate)) * up
    found: Tensor = experts.down.weight[number] @ inner
    return found


def test_the_oracles_activations_are_the_functions_of_their_names() -> None:
    """gelu is x P(N < x); silu is x times the logistic function."""
    plain: Any = Block(_spec({"count": 1})).experts.double()
    for weight in (plain.up.weight, plain.down.weight):
        weight.data.zero_()
        weight.data[0, 0, 0] = 1.0
    token = torch.tensor([0.3, *[0.0] * (HIDDEN - 1)], dtype=torch.float64)
    assert _expert_by_hand(plain, 0, token)[0].item() == pytest.approx(0.3 * 0.5 * (1 + erf(0.3 / sqrt(2))))
    gated: Any = Block(_spec({"count": 1}, "SwiGLU")).experts.double()
    for weight in (gated.gate.weight, gated.up.weight, gated.down.weight):
        weight.data.zero_()
        weight.data[0, 0, 0] = 1.0
    assert _expert_by_hand(gated, 0, token)[0].item() == pytest.approx(0.3 * 0.3 / (1 + exp(-0.3)))


@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_a_loop_over_tokens_agrees(experts: dict[str, Any], activation: str) -> None:
    spec = _spec(experts, activation)
    block, source = _block(spec), _features()
    weight = torch.randn(source.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    names = [n for n, _ in block.named_parameters() if n.startswith(("router.", "experts."))]
    results: list[dict[str, Any]] = []
    for compute in (_mixed, lambda block, hidden: _by_hand(block, spec, hidden)[0]):
        hidden = source.clone().requires_grad_()
        out = compute(block, hidden)
        block.zero_grad()
        (out * weight).sum().backward()
        gradients = {name: block.get_parameter(name).grad for name in names}
        zeros = {name: torch.zeros_like(block.get_parameter(name)) for name in names}
        known = {name: zeros[name] if grad is None else grad for name, grad in gradients.items()}
        results.append({"out": out.detach(), "hidden": hidden.grad, **known})
    ours, theirs = results
    for name, expected in theirs.items():
        assert torch.allclose(ours[name], expected, rtol=1e-12, atol=1e-13), name
    router = ours["router.weight"].abs().max().item()
    assert spec.experts
    assert (router > 1e-3) == (spec.experts.count > spec.experts.prototypes), (
        "with one expert per prototype, the router has nothing to learn"
    )


def test_some_mixtures_refuse_tokens_and_some_do_not() -> None:
    refused = [_by_hand(_block(_spec(experts)), _spec(experts), _features())[1] for experts in MIXTURES]
    assert refused[0] == 0
    assert min(refused[1:4]) > 0


def test_an_expert_without_tokens_has_a_gradient_of_zeros() -> None:
    block = _block(_spec({"count": 40, "capacityFactor": "40"}))
    parameters = [p for n, p in block.named_parameters() if n.startswith(("router.", "experts."))]
    gradients = torch.autograd.grad(_mixed(block, _features(1)).sum(), parameters)
    idle = [of_one for gradient in gradients if gradient.dim() == 3 for of_one in gradient if not of_one.any()]
    assert len(idle) >= 2 * (40 - LENGTH)


class _Fills(TorchDispatchMode):
    """Counts the operations that write zeros into a gradient of all experts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_fill = func._schema.name in ("aten::zero_", "aten::fill_", "aten::index_fill_")
        self.found += is_fill and args[0].dim() == 3
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_one_kernel_zeroes_the_gradients_of_all_idle_experts(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some grouped kernels leave the gradient of an expert without rows as they found it."""
    experts, product = StackedFeedForward(40, 16, FeedForward(size=24)), F.grouped_mm
    for parameter in experts.parameters():
        parameter.data.normal_(generator=torch.Generator().manual_seed(5))
    # One expert after 39 idle ones, two experts among idle ones, and no idle expert.
    sizes = [int(expert >= 40 - rows) for expert in range(40)] if rows != 3 else [0, 2, *[0] * 37, 1]
    source = torch.randn(sum(sizes), 16, generator=torch.Generator().manual_seed(6))

    def grouped_mm(left: Tensor, right: Tensor, *, offs: Tensor) -> Tensor:
        out = product(left, right, offs=offs)
        if out.dim() == 3:
            out.masked_fill_(torch.tensor(sizes)[:, None, None] == 0, torch.nan)
        return out

    monkeypatch.setattr(F, "grouped_mm", grouped_mm)
    out = experts.outputs(source, torch.tensor(sizes), sizes)
    with _Fills() as fills:
        found = torch.autograd.grad(out.sum(), [experts.up.weight, experts.down.weight])
    assert fills.found == (0 if rows == 40 else 2), "one for each of the two tensors"
    for gradient in found:
        assert [bool(of_one.any()) for of_one in gradient] == [size > 0 for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
def test_one_expert_is_the_dense_layer_to_the_bit(activation: str, dtype: torch.dtype) -> None:
    dense, block = (
        _block(_spec(experts, activation), dtype) for experts in (None, {"count": 1, "capacityFactor": "1"})
    )
    state = {
        name.replace("ffn.", "experts."): value[None] if name.startswith("ffn.") else value
        for name, value in dense.state_dict().items()
    }
    block.load_state_dict(state | {"router.weight": block.router.weight})
    source = _features(dtype=dtype)
    rotation = rotary(_spec(None), LENGTH, source)
    assert torch.equal(dense(source, rotation), block(source, rotation))


@pytest.mark.parametrize(
    ("experts", "tokens"),
    [
        ({"count": 4}, 4),  # 1.25 x 10 / 4 = 3.125
        ({"count": 4, "prototypes": 2}, 7),  # 6.25
        ({"count": 10, "capacityFactor": "1"}, 1),
        ({"count": 10, "capacityFactor": "1.1"}, 2),
        ({"count": 1, "capacityFactor": "1.1"}, 11),
        ({"count": 5, "capacityFactor": "1e-3"}, 1),
    ],
)
def test_the_capacity_is_the_share_rounded_up(experts: dict[str, Any], tokens: int) -> None:
    assert _spec(experts).expert_capacity == tokens


def test_the_capacity_is_that_of_the_decimal_number() -> None:
    """In binary floating point, 1.1 is greater than 11 / 10."""
    spec = _spec({"count": 1, "capacityFactor": "1.1"}).model_copy(update={"sequence_length": 100})
    assert ceil(1.1 * 100) == 111
    assert spec.expert_capacity == 110


def _model(experts: dict[str, Any]) -> Transformer:
    return build_model(_spec(experts, layers=3), Sharing(blocks=3), 5, torch.float64)


TIGHT = {"count": 6, "prototypes": 2, "capacityFactor": "0.75"}
TOKENS = torch.randint(256, (4, LENGTH), generator=torch.Generator().manual_seed(6))


def test_no_position_sees_a_later_byte() -> None:
    """The same holds for full experts: only earlier tokens take capacity."""
    model = _model(TIGHT)
    for place in range(LENGTH):
        changed = TOKENS.clone()
        changed[:, place] = (changed[:, place] + 1) % 256
        before, after = model(TOKENS), model(changed)
        torch.testing.assert_close(before[:, :place], after[:, :place], rtol=0, atol=1e-13)
        assert not torch.allclose(before[:, place], after[:, place])


def test_a_beginning_has_the_logits_that_it_has_in_the_whole() -> None:
    """Hence generation sees the same logits as training."""
    model = _model(TIGHT)
    for length in range(1, LENGTH):
        torch.testing.assert_close(model(TOKENS[:, :length]), model(TOKENS)[:, :length], rtol=0, atol=1e-13)


def test_sequences_do_not_take_each_others_room() -> None:
    model = _model(TIGHT)
    together = model(TOKENS)
    for row in range(len(TOKENS)):
        torch.testing.assert_close(model(TOKENS[row : row + 1])[0], together[row], rtol=0, atol=1e-13)


@pytest.mark.parametrize("experts", MIXTURES, ids=str)
def test_a_layers_pass_waits_for_the_device_once_whatever_the_prototypes(experts: dict[str, Any]) -> None:
    assert_waits_once(_mixed, _block(_spec(experts)), _features())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["GELU", "SwiGLU"])
@pytest.mark.parametrize("experts", [*MIXTURES[:3], MIXTURES[5]], ids=str)
def test_experts_in_groups_are_those_one_by_one(
    experts: dict[str, Any], activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts have no tokens."""
    hidden = torch.randn(3, LENGTH, 16, generator=torch.Generator().manual_seed(4)).to(dtype)
    assert_groups_compute_the_same(_mixed, _spec(experts, activation, hidden=16, inner=24), hidden, monkeypatch)


def test_experts_whose_rows_are_not_aligned_run_one_by_one() -> None:
    """A row of 12 bfloat16 numbers has 24 bytes, which is not a multiple of 16."""
    rows = torch.zeros(2, 16)
    assert can_group(rows, torch.zeros(4, 24, 16))
    assert not can_group(rows.bfloat16(), torch.zeros(4, 12, 16).bfloat16())
    assert not can_group(rows, torch.zeros(4 * 24 * 16 + 1)[1:].view(4, 24, 16))
    assert not can_group(rows.double(), torch.zeros(4, 24, 16).double())
