"""The timed part of the mixture benchmark: its jobs, the agreement of losses, and the processing of
measured seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_api.spec.job import PseudoRealJob

from benchmarks.agreement import LossesDiffer
from benchmarks.moe.beside import agreement
from benchmarks.moe.beside.cases import CASES, LENGTH, SEQUENCES, TIMED, WARM_UP, Case, job
from benchmarks.moe.beside.measure import message_in
from benchmarks.moe.beside.names import COUNTERPARTS, DEEPSPEED, FULL, GRADIENTS, TORCHTITAN, stacks_of
from benchmarks.moe.beside.registry import STACKS
from benchmarks.moe.engines import config_of, engine_of, train_step
from benchmarks.moe.results import Beside, Product, Results, Run, Step, Taken, Turn, ratio
from benchmarks.moe.steps import grouped, growth, routing
from benchmarks.moe.steps_report import flat_to, rows, section
from benchmarks.work import noisy_sequences
from tests.unit.benchmarks.fake_results import MACHINE

FLOAT32, BFLOAT16 = (next(case for case in CASES if case.compute == compute) for compute in agreement.TOLERANCES)


def test_all_stacks_are_known_and_compared_with_one_that_runs_beside_them() -> None:
    for case in CASES:
        stacks = stacks_of(case)
        assert set(stacks) <= set(STACKS)
        assert {COUNTERPARTS[stack] for stack in stacks if stack in COUNTERPARTS} <= set(stacks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.label}, {case.compute}")
def test_jobs_beside_others_spread_their_experts_over_both_ranks(case: Case, tmp_path: Path) -> None:
    config = config_of(job(case, "Full"), tmp_path)
    assert (config.ranks, config.parallelism.expert_ranks) == (2, 2)
    assert config.batch.sequences * config.model.sequence_length == SEQUENCES * LENGTH


def test_a_token_meets_as_much_however_many_experts_there_are() -> None:
    models = [PseudoRealJob.from_object(growth.body(n, "Host", growth.FEW)).spec.model for n in growth.COUNTS]
    met = {(model.experts.top_k.per_token, model.expert.size) for model in models if model.experts}  # type: ignore[union-attr]
    assert met == {(growth.PER_TOKEN, growth.EXPERT_SIZE)}
    assert [model.experts and model.experts.count for model in models] == [16, 64, 256, 1024]


@pytest.mark.parametrize("choices", routing.CHOICES)
def test_prototypes_and_top_k_have_the_same_experts(choices: int) -> None:
    prototypes, top_k = (_model(body) for body in routing.bodies(choices).values())
    assert prototypes.experts.prototypes == top_k.experts.top_k.per_token == choices
    assert prototypes.experts.count == top_k.experts.count
    assert choices * prototypes.expert.size == choices * top_k.expert.size == routing.ROWS


def _model(body: dict[str, Any]) -> Any:
    return PseudoRealJob.from_object(body).spec.model


def run(stack: str, case: Case, loss: float = 5.0, seconds: float = 1.0) -> Run:
    step = Step(seconds=seconds, processor=seconds / 2, loss=loss)
    return Run(stack=stack, case=case, steps=[step] * (WARM_UP + TIMED))


def test_losses_must_agree_in_the_type_of_the_case() -> None:
    for case, apart in ((FLOAT32, 1e-4), (BFLOAT16, 1e-2)):
        agreement.check(run(DEEPSPEED, case, loss=5.0 * (1 + apart / 10)), [run(FULL, case)])
        with pytest.raises(LossesDiffer, match="find out which one"):
            agreement.check(run(DEEPSPEED, case, loss=5.0 * (1 + apart)), [run(FULL, case)])


def test_what_failed_has_no_losses_to_agree_on() -> None:
    failed = Run(stack=DEEPSPEED, case=FLOAT32, error="no")
    agreement.check(failed, [run(FULL, FLOAT32)])
    with pytest.raises(LossesDiffer, match=FULL):
        agreement.check(run(GRADIENTS, FLOAT32, loss=9.0), [failed, run(FULL, FLOAT32)])


def test_how_far_losses_are_apart_is_that_of_one_step_and_type() -> None:
    runs = [run(FULL, FLOAT32), run(DEEPSPEED, FLOAT32, loss=5.5), run(FULL, BFLOAT16, loss=50.0)]
    assert agreement.furthest(runs, "float32") == pytest.approx(0.1)
    assert agreement.furthest(runs, "bfloat16") == 0


def test_the_error_of_a_stack_is_its_last_exception() -> None:
    log = ["The last lines of x:", "  Traceback", "  ValueError: first", "  RuntimeError: no CUDA", "  =====", ""]
    assert message_in(log) == "RuntimeError: no CUDA"
    assert message_in(["python ended with exit code -9."]) == "python ended with exit code -9."


def taken(label: str, *seconds: float, dropped: float = 0.0) -> Taken:
    turns = [Turn(seconds=each, passes=each / 2, others=each / 4) for each in seconds]
    return Taken(label=label, turns=turns, losses=[1.0], dropped=dropped)


def test_turns_are_compared_with_those_of_the_same_time() -> None:
    """In the second turn the machine is ten times as slow."""
    assert ratio(taken("64", 2.0, 20.0, 3.0), taken("16", 1.0, 10.0, 1.0)) == 2.0


def test_flat_ends_where_the_first_one_is_not() -> None:
    assert flat_to([1.0, 1.1, 1.16, 1.0]) == growth.COUNTS[1]
    assert flat_to([1.0, 1.1, 1.15, 1.15]) == growth.COUNTS[3]


def test_homes_must_have_the_same_losses() -> None:
    found = {name: [taken("16", 1.0)] for name in growth.curves()}
    growth.check_homes(found)
    found[growth.name_of("Disk", growth.FEW)] = [taken("16", 1.0).model_copy(update={"losses": [1.0000001]})]
    with pytest.raises(LossesDiffer, match="Disk"):
        growth.check_homes(found)


def test_refused_tokens_are_no_rows() -> None:
    assert rows(4, taken("prototypes", 1.0, dropped=0.25)) == 3


def test_both_ways_to_multiply_agree_and_float64_has_no_grouped_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "ROWS", 64)
    found = grouped.products(4, torch.float32)
    assert [(each.way, len(each.turns)) for each in found] == [
        (way, grouped.TURNS) for way in (grouped.NEW, grouped.LOOP, grouped.GROUPED)
    ]
    assert "Double" in (grouped.products(4, torch.float64)[-1].error or "")


def test_the_engine_of_a_job_trains(tmp_path: Path) -> None:
    body = growth.body(16, "Host", sequences=2)
    with engine_of(PseudoRealJob.from_object(body), tmp_path) as engine:
        batches = noisy_sequences(2, 2, growth.LENGTH + 1, 7)
        losses = [train_step(engine, batch, step).loss_sum for step, batch in enumerate(batches)]
    assert losses[1] < losses[0]


def test_the_section_shows_ratios_errors_and_where_steps_are_flat(tmp_path: Path) -> None:
    runs = [run(stack, case) for case in CASES for stack in stacks_of(case) if stack not in COUNTERPARTS]
    runs += [run(DEEPSPEED, case, seconds=1.5) for case in CASES]
    runs += [Run(stack=TORCHTITAN, case=case, error="RuntimeError: no") for case in CASES if case.compute == "bfloat16"]
    curve = [taken(str(count), seconds) for count, seconds in zip(growth.COUNTS, (1.0, 1.1, 1.5, 9.0), strict=True)]
    text = section(
        Results(
            machine=MACHINE,
            beside=Beside(runs=runs, versions={"torch": "9", "deepspeed": "8"}),
            growth=dict.fromkeys(growth.curves(), curve),
            routing={"2": [taken("prototypes", 1.0, dropped=0.5), taken("top k", 3.0)]},
            grouped=[
                Product(experts=16, dtype="float32", way=grouped.LOOP, turns=[0.002]),
                Product(experts=16, dtype="float32", way=grouped.GROUPED, turns=[0.001]),
                Product(experts=16, dtype="float32", way=grouped.NEW, turns=[0.008]),
            ],
        ),
        tmp_path,
    )
    assert "| 1,500 (1.50×) | 1,500 (1.50×) | 750 (1.50×) |" in text
    assert f"| {TORCHTITAN} | `RuntimeError: no` |" in text
    assert "host, 8,192 tokens: flat within 15% to 64 experts by the time of a step" in text
    assert "| 2 | 1.00 | 0.50 | 2.00 | 1.50 | 3.00× | 1.50× | 3.00× |" in text
    assert "| float32, 16 experts | 2.0 | 1.0 (0.50×) | 8.0 (4.00×) |" in text
    assert (tmp_path / "moe-steps.svg").exists()
