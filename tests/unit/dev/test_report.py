"""Figures and plot at the end of the demo."""

from pathlib import Path
from typing import Any

from pseudoreal_api.status.status import PseudoRealJobStatus
from pseudoreal_dev.demo import report

EVENTS: list[dict[str, Any]] = [
    {"event": "corpus", "order2_nats": 2.0},
    {"event": "progress", "phase": "pseudo", "step": 1, "loss": 5.0, "validation_loss": None},
    {"event": "progress", "phase": "pseudo", "step": 2, "loss": 4.0, "validation_loss": 4.1},
    {"event": "progress", "phase": "real", "step": 3, "loss": 3.0, "validation_loss": 1.5},
]
STATUS = PseudoRealJobStatus.model_validate(
    {
        "phases": [
            {"name": "pseudo", "state": "Complete", "validationLoss": "4.1000"},
            {"name": "real", "state": "Complete", "startValidationLoss": "4.1000", "validationLoss": "1.5000"},
        ]
    }
)


def test_the_result_compares_with_the_baseline_and_over_the_delink() -> None:
    found = report.result(STATUS, EVENTS)
    assert found.better_by == 0.25
    assert found.delinked == (("4.1000", "4.1000"),)


def test_the_sentences_name_the_figures() -> None:
    first, second = report.sentences(report.result(STATUS, EVENTS))
    assert "1.5000 against 2.0000" in first
    assert "25% lower" in first
    assert "4.1000 before, 4.1000 after" in second


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    report.draw(EVENTS, 2.0, tmp_path / "out" / "loss.png")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
