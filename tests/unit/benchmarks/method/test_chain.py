"""Arms become chains of jobs that train the same steps as one uninterrupted job would."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
from pseudoreal_api.spec.optimizer import Optimizer
from pseudoreal_trainer.training.schedule import learning_rate

from benchmarks.method.arms import ARMS, BUDGETS, GPU, REGISTERED, REMEDIES, SIZES, TINY, Arm, Scale, Stage, Study
from benchmarks.method.chain import Link, Run, decays


def _arm(name: str, study: Study = "dense") -> Arm:
    return next(arm for arm in ARMS[study] if arm.name == name)


def _run(name: str = "delinked at 30 %", *, study: Study = "dense", **changes: Any) -> Run:
    return replace(Run(study, _arm(name, study), 16, seed=0, rate=8e-3, text="kernel"), **changes)


def _runs() -> Iterator[Run]:
    """Yield a run of each arm, size and scale, and one that chooses the rate of each arm."""
    scales = ((REGISTERED, SIZES), (GPU, GPU.sizes), (TINY, TINY.sizes))
    for scale, sizes in scales:
        for study, arms in scale.arms.items():
            for arm in arms:
                for size in sizes[study]:
                    yield Run(study, arm, size.width, 0, 8e-3, scale.text, scale=scale)
                yield Run(study, arm, scale.tuned_width, 100, 8e-3, scale.tuning_text, 0.5, scale)


def _links(run: Run, budgets: tuple[float, ...] = BUDGETS) -> dict[str, Link]:
    return {link.key: link for decay in decays(run, budgets) for link in decay.ancestry()}


def test_a_link_is_the_job_that_its_arm_describes() -> None:
    """Trained links are found by the content of their jobs, so any difference here trains them again."""
    decay = decays(_run(width=16))[-1]
    layers = {"batch": {"sequences": 16}, "activations": {"keep": "All"}}
    assert decay.spec("/t") == {
        "model": {
            "layers": 12,
            "hiddenSize": 16,
            "vocabularySize": 512,
            "embeddings": "Tied",
            "attention": {"heads": 2},
            "sequenceLength": 128,
            "feedForward": {"size": 64},
        },
        "data": {
            "path": "/t",
            "seed": 0,
            "sources": [{"name": "text", "path": "/t/train"}],
            "tokenizer": {"type": "File", "path": "/t/tokenizer.json"},
            "validation": {
                "everySteps": 1_000_000,
                "sequences": 1,
                "sets": [{"name": "validation", "path": "/t/validation"}],
            },
        },
        # 20 tokens for each of 12 * 12 * 16 * 16 parameters are 360 steps of 2,048 tokens; 72 of the 324 after the
        # warm-up decay.
        "optimizer": {
            "learningRate": "0.008",
            "warmupSteps": 36,
            "schedule": "WarmupStableDecay",
            "decayFraction": "0.222222222",
            "finalFraction": "0",
        },
        "precision": {"compute": "float32"},
        "phases": [{"name": "layers12-blocks12", "until": {"step": 360}, **layers}],
        "checkpoint": {"everySteps": 1_000_000, "mode": "Sync"},
    }
    first = decay.ancestry()[0].spec("/t")
    shared = {"name": "layers12-blocks1", "until": {"step": 36}, "sharing": {"blocks": 1}, **layers}
    assert first["phases"] == [shared]
    assert first["optimizer"] == {"learningRate": "0.008", "warmupSteps": 36, "schedule": "Constant"}


@pytest.mark.parametrize("run", [*_runs()], ids=lambda run: f"{run.label} {run.fraction:g}")
def test_the_jobs_of_a_chain_train_each_step_in_the_stage_of_its_arm(run: Run) -> None:
    """Compared step by step with the arm's definition."""
    for decay in decays(run):
        trained: list[Stage] = []
        chain = decay.ancestry()
        for link in chain:
            assert link.begin == len(trained)
            phases = link.spec("")["phases"]
            assert len({phase["name"] for phase in phases}) == len(phases)
            for stage, phase in zip(link.stages, phases, strict=True):
                trained += [stage] * (phase["until"]["step"] - len(trained))
            assert link.end == len(trained)
        assert trained == [_stage(run, step) for step in range(1, decay.end + 1)]
        # A delink and a growth need the phase before them in their own job.
        assert all(before.stages[-1] == after.stages[0] for before, after in pairwise(chain))


def _stage(run: Run, step: int) -> Stage:
    return next(stage for stage in run.arm.stages if step <= round(stage.until * run.steps))


@pytest.mark.parametrize("run", [*_runs()], ids=lambda run: f"{run.label} {run.fraction:g}")
def test_each_budget_has_the_rates_of_one_job_with_a_decay_over_its_last_fifth(run: Run) -> None:
    for budget, decay in zip(BUDGETS, decays(run), strict=True):
        end, cut = round(run.steps * budget), round(run.steps * budget * 0.8)
        assert (decay.end, decay.decay_from, decay.begin) == (end, cut, cut)
        for link in decay.ancestry():
            optimizer = Optimizer.model_validate(link.spec("")["optimizer"])
            for step in range(link.begin + 1, link.end + 1):
                falling = (end - step) / (end - cut) if step > cut else 1.0
                wanted = run.rate * min(1.0, step / run.warmup_steps) * falling
                assert learning_rate(optimizer, step, link.end) == pytest.approx(wanted, rel=1e-4, abs=1e-9 * run.rate)


def test_jobs_continue_the_jobs_of_their_parents() -> None:
    for link in _links(_run()).values():
        parent = None if link.parent is None else f"method-{link.parent.key}"
        assert link.job("/texts").spec.checkpoint.continue_from == parent


def test_links_have_the_same_key_exactly_if_they_train_the_same_from_the_start() -> None:
    runs = [
        *(Run(study, arm, 16, 0, 8e-3, "kernel") for study, arms in ARMS.items() for arm in arms),
        *(_run(seed=1), _run(rate=16e-3), _run(text="kernel-tuning"), _run(width=24), _run(fraction=0.5)),
        *(_run(scale=replace(REGISTERED, **one)) for one in ({"precision": "bfloat16"}, {"sequences": 8})),
    ]
    links = [link for run in runs for decay in decays(run) for link in decay.ancestry()]
    content = [json.dumps([[one.run.text, one.spec("data")] for one in link.ancestry()]) for link in links]
    for (one, here), (other, there) in combinations(zip(links, content, strict=True), 2):
        assert (one.key == other.key) == (here == there)


def test_arms_that_begin_alike_train_their_beginning_once() -> None:
    chains = {name: decays(_run(name))[-1].ancestry() for name in ("delinked at 10 %", "delinked at 30 %")}
    early, late = ([link.key for link in chain] for chain in chains.values())
    assert early[0] == late[0]
    assert not {*early[1:]} & {*late[1:]}
    assert [link.end for link in chains["delinked at 30 %"]][:2] == [36, 108]


def test_an_arm_of_a_smaller_trial_is_cut_only_where_its_own_arms_leave_their_first_stage() -> None:
    arm = _arm("delinked at 30 %")
    scale = Scale(arms={"dense": (_arm("unshared"), arm)})
    run = Run("dense", arm, 16, 0, 8e-3, "kernel", scale=scale)
    assert [link.end for link in decays(run, (1.0,))[0].ancestry()] == [108, 288, 360]


def _remedy(name: str, study: Study = "dense", **changes: Any) -> Run:
    arm = next(arm for arm in REMEDIES[study] if arm.name == name)
    return replace(Run(study, arm, 24, seed=0, rate=8e-3, text="kernel", scale=REGISTERED), **changes)


def test_a_remedy_changes_the_job_of_its_transition_alone() -> None:
    """The links before the transition are those of the base."""
    base = decays(_run(width=24))[-1].ancestry()
    for name, delink in (("noise", {"noise": "0.1"}), ("Reset", {"optimizerState": "Reset"})):
        links = decays(_remedy(f"delinked at 30 %, {name}"))[-1].ancestry()
        assert [link.spec("/t").get("delink") for link in links][:4] == [None, None, delink, None]
        assert [one.key == other.key for one, other in zip(base, links, strict=True)][:4] == [True, True, False, False]


def test_gradients_are_measured_by_the_job_that_delinks() -> None:
    """Of 810 steps the first 243 share."""
    links = decays(_remedy("delinked at 30 %, Measured"))[-1].ancestry()
    assert [(link.begin, link.end) for link in links][:3] == [(0, 81), (81, 223), (223, 324)]
    assert [len(link.stages) for link in links] == [1, 1, 2, 1, 1, 1]
    assert links[2].spec("/t")["delink"] == {"optimizerState": "Measured"}
    assert [phase["until"] for phase in links[2].spec("/t")["phases"]] == [{"step": 243}, {"step": 324}]


def test_a_stage_may_have_its_own_rate_and_the_second_one_a_warmup() -> None:
    links = decays(_remedy("delinked at 30 %, rates of each phase, warmed up again", first_rate=2e-3))[-1].ancestry()
    rates = [link.spec("/t")["optimizer"]["learningRate"] for link in links]
    assert rates == ["0.002", *["0.008"] * (len(links) - 1)]
    assert links[1].spec("/t")["delink"] == {"warmupSteps": 40}
    assert links[1].begin == 243
    assert links[1].end > 243 + 40


def test_arms_whose_sharing_no_job_has_are_other_links() -> None:
    tied, base = (
        decays(run)[-1].ancestry() for run in (_remedy("all but norms shared, delinked at 30 %"), _run(width=24))
    )
    assert not {link.key for link in tied} & {link.key for link in base}
    assert all("sharing" not in phase for link in tied for phase in link.spec("/t")["phases"])
