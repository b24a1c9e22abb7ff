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
