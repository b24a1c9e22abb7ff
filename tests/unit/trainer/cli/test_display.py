"""Terminal output of a local run for its log events."""

import io

import pytest
from pseudoreal_trainer.cli.display import Display
from rich.console import Console

STARTED = {
    "event": "phase_started",
    "phase": "pseudo",
    "step": 0,
    "phase_steps": 10,
    "layers": 8,
    "parameters": 1000,
    "ranks": 2,
    "device": "cpu",
    "resumed_from": None,
}
DELINKED = {"event": "delinked", "checkpoint": "real-00000010", "parent": "pseudo-00000010"}


@pytest.mark.parametrize(
    ("blocks", "sets", "says"),
    [(2, 0, "2 blocks"), (8, 1, "8 blocks and 1 set of experts"), (8, 4, "4 sets of experts")],
)
def test_start_of_a_phase_names_blocks_and_sets_of_experts(blocks: int, sets: int, says: str) -> None:
    out = io.StringIO()
    with Display(Console(file=out)) as display:
        for event in (STARTED, DELINKED):
            display.show(event | {"blocks": blocks, "sets_of_experts": sets})
    started, delinked = out.getvalue().splitlines()
    assert f"8 layers of {blocks} blocks" in started
    assert f"{says}, 1,000 parameters" in started
    assert f"{says}: real-00000010 from pseudo-00000010" in delinked


@pytest.mark.parametrize(
    ("layers", "experts", "says"),
    [
        ((4, 12), (0, 0), "grown from 4 to 12 layers (Interleave), 12 blocks: deep-00000010 from shallow-00000010"),
        ((12, 12), (2, 8), "grown from 2 to 8 experts, 12 blocks: deep-00000010 from shallow-00000010"),
        ((4, 12), (2, 8), "grown from 4 to 12 layers (Interleave) and from 2 to 8 experts, 12 blocks: "),
    ],
)
def test_growth_is_shown_by_the_numbers_of_layers_and_experts(
    layers: tuple[int, int], experts: tuple[int, int], says: str
) -> None:
    event = {"event": "grown", "checkpoint": "deep-00000010", "parent": "shallow-00000010", "pattern": "Interleave"}
    counts = {"layers_before": layers[0], "layers": layers[1], "experts_before": experts[0], "experts": experts[1]}
    out = io.StringIO()
    with Display(Console(file=out, width=200)) as display:
        display.show({**event, **counts, "blocks": 12, "sets_of_experts": 0})
    assert says in out.getvalue()


def _report(step: int, loss: float | None) -> dict[str, object]:
    return {
        "event": "progress",
        "phase": "pseudo",
        "step": step,
        "total_steps": 100,
        "loss": loss,
        "validation_loss": None,
        "tokens": step * 1024,
        "learning_rate": 0.001,
        "seconds": 1.0,
        "global_cursor": step,
        "tokens_per_second": 1000.0,
        "remaining_seconds": 5.0,
    }


def test_a_terminal_shows_the_bar_and_the_curve_of_the_loss() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=90, height=30)
    with Display(console) as display:
        for step, loss in enumerate((4.0, None, 2.0), start=1):
            display.show(_report(step, loss))
        display.show({"event": "phase_finished", "phase": "pseudo", "step": 2, "seconds": 1.0})
    last = out.getvalue().rpartition("phase pseudo finished at step 2")[2]
    assert "3/100 loss 2.0000" in last
    assert "4 ┤" in last
    assert "┊" in last, "the end of the phase is marked"
    assert "step 1" in last


def test_a_long_run_keeps_a_bounded_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pseudoreal_trainer.cli.display._MOST_LOSSES", 50)
    display = Display(Console(file=io.StringIO(), force_terminal=True))
    for step in range(1, 1001):
        display.show(_report(step, 1.0))
    assert len(display._losses) <= 50
    assert min(display._losses) == 1
    assert max(display._losses) > 950


def test_reports_may_come_while_the_curve_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The live view draws in a thread of its own."""
    display = Display(Console(file=io.StringIO(), force_terminal=True))
    for step in (1, 2, 3):
        display.show(_report(step, 1.0))

    def plot(losses: dict[int, float], *_: object) -> list[str]:
        for step in losses:
            display.show(_report(step + 10, 1.0))
        return []

    monkeypatch.setattr("pseudoreal_trainer.cli.display.plot", plot)
    display._draw()
    assert [*display._losses] == [1, 2, 3, 11, 12, 13]


def test_a_pipe_gets_lines_without_a_curve() -> None:
    out = io.StringIO()
    with Display(Console(file=out)) as display:
        for step in (1, 2):
            display.show(_report(step, 3.0))
    assert out.getvalue().splitlines() == ["pseudo  step 1/100  loss 3.0000  val -  1,000 tok/s  ETA 0:05"]
