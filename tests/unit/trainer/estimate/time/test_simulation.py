from dataclasses import replace

import pytest
from pseudoreal_trainer.estimate.time.simulation import Span, Task, simulate


def task(stream: str, seconds: float, *follows: int, core: bool = True) -> Task:
    return Task((0, stream), seconds, follows, core)


def test_streams_run_concurrently_and_each_in_order() -> None:
    spans = simulate([task("a", 2), task("b", 3), task("a", 1), task("b", 1, 2)], cores=None)
    assert spans == [Span(0, 2), Span(0, 3), Span(2, 3), Span(3, 4)]


def test_task_waits_for_a_later_task_of_the_list() -> None:
    spans = simulate([task("a", 1, 1), task("b", 5)], cores=None)
    assert spans == [Span(5, 6), Span(0, 5)]


def test_two_tasks_on_one_core_take_turns() -> None:
    """Both run at half pace until the shorter one has had its second, at 2; then the longer one has 2 left."""
    assert simulate([task("a", 1), task("b", 3)], cores=1) == [Span(0, 2), Span(0, 4)]


def test_three_tasks_share_two_cores_evenly() -> None:
    """All run at two thirds of the pace until the first ends at 3 / (2/3) = 4.5. The others then lack 1 of their 4, and
    go on at full pace."""
    spans = simulate([task("a", 3), task("b", 4), task("c", 4)], cores=2)
    assert [span.end for span in spans] == pytest.approx([4.5, 5.5, 5.5])


def test_task_without_a_core_keeps_its_pace() -> None:
    spans = simulate([task("a", 2), task("b", 2), task("disk", 3, core=False)], cores=1)
    assert [span.end for span in spans] == pytest.approx([4, 4, 3])


def test_tasks_without_length_pass_on_at_once() -> None:
    spans = simulate([task("a", 0), task("b", 0, 0), task("c", 2, 1), task("a", 0, 2)], cores=1)
    assert [span.end for span in spans] == [0, 0, 2, 2]


@pytest.mark.parametrize(("agreed_after", "ends"), [(1.0, [2, 1, 2, 7]), (3.0, [2, 3, 6, 6])])
def test_task_that_starts_too_late_is_left_to_another(agreed_after: float, ends: list[float]) -> None:
    """Tasks: one that occupies the stream for 2; an agreement; an early update of 4 behind the first task; an update of
    5 that takes no time if the early one has worked."""
    early = replace(task("updates", 4), dropped_after=1)
    update = replace(task("updates", 5, 1), done_by=2)
    spans = simulate([task("updates", 2), task("agreement", agreed_after), early, update], cores=None)
    assert [span.end for span in spans] == ends


def test_circular_dependencies_are_refused() -> None:
    with pytest.raises(ValueError, match="2 tasks never begin"):
        simulate([task("a", 1, 1), task("b", 1, 0)], cores=None)
