"""Operations, bytes and prices of stages. Hand-counted: width H, sequences of T = 128 tokens, 512 rows of vocabulary.

A dense layer has 4 H² weights in attention and 8 H² in the MLP, and two norms of H. A token's forward pass takes two
operations for each weight, and 2 H T for scores and values of the half of the tokens before it; backward twice as much.
"""

import pytest

from benchmarks.method import costs
from benchmarks.method.arms import ARMS, Study, full_steps, parameters
from benchmarks.method.costs import by_bytes, by_flops, by_seconds, by_tokens, shares, spending
from tests.unit.benchmarks.method.support.samples import arm

T = 128


def total(study: Study, name: str, price: costs.Price, width: int = 24) -> float:
    return spending(shares(study, width, arm(study, name)), price).until(1)


@pytest.mark.parametrize("width", [16, 24, 32])
def test_a_dense_stage_is_counted_as_by_hand(width: int) -> None:
    found = costs.stage_cost("dense", width, arm("dense", "unshared").stages[0])
    assert found.flops == 3 * 12 * (2 * 12 * width**2 + 2 * width * T)
    assert found.head_flops == 3 * 2 * width * 512
    assert found.state_bytes == 12 * 12 * (12 * width**2 + 2 * width)
    assert found.embedding_bytes == 12 * (512 * width + width)


def test_a_shared_stage_computes_as_much_and_has_the_state_of_its_blocks() -> None:
    names = ("unshared", "4 blocks throughout")
    real, shared = (costs.stage_cost("dense", 24, arm("dense", name).stages[0]) for name in names)
    assert shared.flops == real.flops
    assert 3 * shared.state_bytes == real.state_bytes


def test_an_expert_stage_is_counted_as_by_hand() -> None:
    """A token passes the router (8 H) and 2 experts of 3 matrices, H by 2 H each; the state has all 8 experts."""
    h = 24
    found = costs.stage_cost("experts", h, arm("experts", "unshared").stages[0])
    assert found.flops == 3 * 6 * (2 * (4 * h**2 + 8 * h + 2 * 6 * h**2) + 2 * h * T)
    assert found.state_bytes == 12 * 6 * (4 * h**2 + 8 * h + 2 * h + 8 * 6 * h**2)


def test_shared_experts_leave_attention_norms_and_routers_to_each_layer() -> None:
    h = 24
    found = costs.stage_cost("experts", h, arm("experts", "experts shared throughout").stages[0])
    assert found.state_bytes == 12 * (6 * (4 * h**2 + 8 * h + 2 * h) + 8 * 6 * h**2)


def test_the_stage_before_an_upcycling_has_2_experts() -> None:
    h = 24
    found = costs.stage_cost("experts", h, arm("experts", "upcycled from 2 experts at 30 %").stages[0])
    assert found.state_bytes == 12 * 6 * (4 * h**2 + 2 * h + 2 * h + 2 * 6 * h**2)
    assert found.flops == 3 * 6 * (2 * (4 * h**2 + 2 * h + 2 * 6 * h**2) + 2 * h * T)


@pytest.mark.parametrize("study", ["dense", "experts"])
def test_tokens_cost_the_same_in_all_stages(study: Study) -> None:
    for one in ARMS[study]:
        assert total(study, one.name, by_tokens) == pytest.approx(1)


def test_shares_of_operations_and_bytes_by_stage() -> None:
    assert total("dense", "delinked at 30 %", by_flops) == pytest.approx(1)
    assert total("dense", "delinked at 30 %", by_bytes) == pytest.approx(0.3 / 12 + 0.7)
    assert total("dense", "1, 4, 12 blocks", by_bytes) == pytest.approx(0.1 / 12 + 0.2 / 3 + 0.7)
    assert total("dense", "grown from 4 layers at 30 %", by_flops) == pytest.approx(0.3 / 3 + 0.7)
    assert total("dense", "grown from 1 layer at 50 %", by_bytes) == pytest.approx(0.5 / 12 + 0.5)


def test_at_ratio_1_a_pseudo_step_costs_as_much_as_a_real_one() -> None:
    for name in ("unshared", "shared throughout", "delinked at 30 %", "1, 4, 12 blocks"):
        assert total("dense", name, by_seconds(1)) == pytest.approx(1)


def test_a_shared_stage_costs_its_computing_or_its_bytes() -> None:
    """One block of 12 has a twelfth of the bytes of a real step, 4 blocks a third; computing is 1 / ratio."""
    assert total("dense", "shared throughout", by_seconds(5)) == pytest.approx(0.2)
    assert total("dense", "shared throughout", by_seconds(20)) == pytest.approx(1 / 12)
    assert total("dense", "delinked at 30 %", by_seconds(5)) == pytest.approx(0.3 / 5 + 0.7)
    assert total("dense", "4 blocks, delinked at 30 %", by_seconds(2)) == pytest.approx(0.3 / 2 + 0.7)
    assert total("dense", "4 blocks, delinked at 30 %", by_seconds(20)) == pytest.approx(0.3 / 3 + 0.7)
    assert total("experts", "experts delinked at 50 %", by_seconds(4)) == pytest.approx(0.5 / 4 + 0.5)


def test_a_second_shared_stage_costs_its_computing_or_its_bytes() -> None:
    """4 of 12 blocks: bytes are a third of a real step, computing is 1 / ratio."""
    assert total("dense", "1, 4, 12 blocks", by_seconds(2)) == pytest.approx(0.1 / 2 + 0.2 / 2 + 0.7)
    assert total("dense", "1, 4, 12 blocks", by_seconds(10)) == pytest.approx(0.1 / 10 + 0.2 / 3 + 0.7)


def test_a_grown_arms_first_stage_costs_a_third_at_any_ratio() -> None:
    """4 of 12 layers have a third of the operations and of the bytes."""
    for ratio in (1, 3, 20):
        assert total("dense", "grown from 4 layers at 30 %", by_seconds(ratio)) == pytest.approx(0.3 / 3 + 0.7)


def test_a_stage_with_many_operations_and_few_bytes_costs_operations_first() -> None:
    """2 of 8 experts, 2 for each token: nearly all operations, and under a third of the bytes."""
    h = 24
    flops = (2 * (16 * h**2 + 2 * h) + 2 * h * T) / (2 * (16 * h**2 + 8 * h) + 2 * h * T)
    state = (16 * h**2 + 4 * h) / (52 * h**2 + 10 * h)
    name = "upcycled from 2 experts at 30 %"
    assert total("experts", name, by_seconds(1)) == pytest.approx(0.3 * flops + 0.7)
    assert total("experts", name, by_seconds(2)) == pytest.approx(0.3 * flops / 2 + 0.7)
    assert total("experts", name, by_seconds(10)) == pytest.approx(0.3 * state + 0.7)


def test_a_small_model_costs_its_own_width_throughout() -> None:
    """Width 10 of 24. Operations per token are 24 H² + 2 H T in a layer."""
    flops = (24 * 10**2 + 2 * 10 * T) / (24 * 24**2 + 2 * 24 * T)
    state = (12 * 10**2 + 20) / (12 * 24**2 + 48)
    assert total("dense", "small model", by_flops) == pytest.approx(flops)
    assert total("dense", "small model", by_seconds(1)) == pytest.approx(flops)
    assert total("dense", "small model", by_seconds(20)) == pytest.approx(state)


def test_a_small_model_has_the_bytes_of_the_pseudo_phase_with_the_embedding() -> None:
    """The plan's words. One block of width 24: 12 H² + 2 H, beside 513 H of embedding and norm: 19,272 in all. Of width
    10: 12 times 12 H² + 2 H, beside 513 H."""
    pseudo = costs.stage_cost("dense", 24, arm("dense", "delinked at 30 %").stages[0])
    small = costs.stage_cost("dense", arm("dense", "small model").width[24], arm("dense", "small model").stages[0])
    assert pseudo.state_bytes + pseudo.embedding_bytes == 12 * 19_272
    assert small.state_bytes + small.embedding_bytes == 12 * (12 * 1220 + 5130)
    assert small.state_bytes + small.embedding_bytes == pytest.approx(12 * 19_272, rel=0.05)


def test_sizes_are_those_of_the_plan() -> None:
    assert [parameters("dense", width) for width in (16, 24, 32)] == [36_864, 82_944, 147_456]
    assert [parameters("experts", width) for width in (16, 24, 32)] == [24_576, 55_296, 98_304]
    assert full_steps("dense", 24) == round(20 * 82_944 / 2048)
