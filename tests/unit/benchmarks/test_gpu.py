"""The GPU benchmark: its order within a time limit, its sums, and its section in the document."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pseudoreal_trainer.plan.memory.tiers import resident_bytes
from pseudoreal_trainer.plan.sizes import Sizes

from tests.benchmarks.gpu.budget import MOST_SECONDS, STOP_SECONDS, fits, within
from tests.benchmarks.gpu.case import Request, _Runner
from tests.benchmarks.gpu.cases import Case, suite, warm_up
from tests.benchmarks.gpu.report import TITLE, section, with_section
from tests.benchmarks.gpu.results import Record, loss_differences
from tests.benchmarks.gpu.timeline import Span, Timeline, share_of
from tests.unit.benchmarks.fake_results import on_a_gpu
from tests.unit.trainer.engine.state.fake_memory import pretend_gpu

CASES = suite(tiny=False).cases


class _Machine:
    """A clock, and cases that each advance it by some seconds."""

    def __init__(self, seconds: float) -> None:
        self.now, self._seconds = 0.0, seconds
        self.given: list[float] = []

    def clock(self) -> float:
        return self.now

    def run(self, case: Case, seconds: float) -> Record:
        self.given.append(seconds)
        self.now += min(seconds, self._seconds)
        return Record(case=case)


def test_cases_run_in_their_order_until_the_time_is_over_and_the_rest_is_named() -> None:
    machine = _Machine(seconds=100.0)
    records = [*within(345.0, CASES, machine.run, machine.clock, least=20.0)]
    assert [record.case for record in records] == [*CASES], "every case has a record"
    assert [record.seconds for record in records[:4]] == [100.0, 100.0, 100.0, 40.0]
    assert machine.given == [MOST_SECONDS, MOST_SECONDS, 140.0, 40.0], (
        "a case gets the remaining time, at most MOST_SECONDS"
    )
    assert all(record.left_out == record.case.points for record in records[4:])
    assert records[4].problem == "0 s were left, too few to begin"
    assert machine.now == 345.0 - STOP_SECONDS


def test_the_first_cases_answer_the_question_for_both_models() -> None:
    """pseudoreal and fully_shard with host state come before anything else."""
    first = [(case.model, case.stack) for case in CASES[:5] if case.home == "Host"]
    assert {*first} == {(model, stack) for model in ("1B", "4B") for stack in ("pseudoreal", "fully_shard")}


def test_both_stacks_train_on_the_same_steps() -> None:
    """Otherwise their losses could not be compared: the first points of fully_shard are pseudoreal's."""
    ours = next(case for case in CASES if case.stack == "pseudoreal" and case.clipping == "Global")
    theirs = next(case for case in CASES if case.stack == "fully_shard")
    assert theirs.points[: len(ours.points)] == ours.points
    assert [warm_up(ours, n) for n in range(4)] == [warm_up(theirs, n) for n in range(4)] == [2, 1, 1, 1]


def test_a_point_is_begun_only_if_it_would_end() -> None:
    assert fits(left=40.0, last_step=2.0, growth=2.0, steps=10)
    assert not fits(left=39.0, last_step=2.0, growth=2.0, steps=10)


def test_pinned_bytes_are_those_of_torch_and_those_that_the_engine_pins_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny = suite(tiny=True)
    case = next(case for case in tiny.cases if (case.stack, case.home) == ("pseudoreal", "Host"))
    memory = pretend_gpu(monkeypatch)
    request = Request(case=case, is_tiny=True, device="cpu", seconds=60, folder=tmp_path, profile=None, result=tmp_path)
    runner = _Runner(request)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.peak": 1 << 30})
    ours: Any = runner.trainer
    for number, point in enumerate(case.points[:2]):
        measured = runner.measure(number)
        assert measured.pinned_bytes == memory.pinned + (1 << 30)
        sequences = point.tokens // point.micro_batches // ours.model.sequence_length
        sizes = Sizes(ours.model, ours.units, 2, 4, sequences, device="cuda")
        assert memory.pinned == resident_bytes(ours.layout, sizes, 0).pinned
    ours.close()


def test_the_hidden_share_counts_overlapping_copies_once() -> None:
    kernels = [Span(0, 10), Span(20, 30)]
    timeline = Timeline(kernels, to_device=[Span(5, 15), Span(8, 12)], to_host=[Span(25, 30)], offset=0.0)
    assert timeline.hidden_share == pytest.approx((5 + 5) / 15)
    assert share_of([], kernels) is None


def test_without_results_the_section_says_so(tmp_path: Path) -> None:
    assert section(tmp_path / "none.json").startswith(f"{TITLE}\n\nNo figures yet: ")


def test_the_document_has_the_section_of_a_clone_without_results() -> None:
    assert TITLE in Path("docs/benchmarks.md").read_text()


def test_the_section_has_every_figure_and_what_was_left_out(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(on_a_gpu().model_dump_json())
    text = section(tmp_path / "r.json")
    assert "| pseudoreal, Host, PerUnit | 8,192 | 4 | 1,500 (1,250–1,750) | 5,461 | 91% |" in text
    assert "| 91% | 10.0 (-10%) | 1.0 | 1,800 (+20%) |" in text
    assert "- 1B, pseudoreal, Host, clipping PerUnit: 16,384, 32,768, 65,536 tokens: no time." in text
    assert "ended by signal 9." in text
    assert "Commit cccccccccccc, 2026-01-02" in text


def test_losses_are_compared_where_both_stacks_had_the_same_steps() -> None:
    """The further points of fully_shard, with one micro-batch, have no counterpart."""
    case = next(case for case in CASES if case.stack == "pseudoreal" and case.clipping == "Global")
    theirs = next(other for other in CASES if other.stack == "fully_shard" and other.model == case.model)
    measured = on_a_gpu().records[0].measured[0]
    near = measured.model_copy(update={"losses": (5.5, 5.5, 5.61)})
    records = [Record(case=case, measured=(measured,)), Record(case=theirs, measured=(near, measured))]
    assert loss_differences(records) == {"1B": pytest.approx(5.61 / 5.5 - 1, rel=0.03)}
    assert loss_differences(records[:1]) == {}


def test_the_section_is_replaced_and_nothing_else() -> None:
    document = f"# Benchmarks\n\n## A\n\nx\n\n{TITLE}\n\nold\n\n### 1B\n\nold\n\n## B\n\ny\n"
    assert with_section(document, f"{TITLE}\n\nnew") == f"# Benchmarks\n\n## A\n\nx\n\n{TITLE}\n\nnew\n\n## B\n\ny\n"
    assert with_section("# Benchmarks\n", f"{TITLE}\n\nnew") == f"# Benchmarks\n\n{TITLE}\n\nnew\n"
