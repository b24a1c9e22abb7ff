"""A benchmark refuses to measure beside other programs."""

import pytest

from benchmarks import quiet
from benchmarks.quiet import quiet_machine


class Seconds:
    """Scripted clocks: each reading takes the next entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, others: tuple[float, float]) -> None:
        """`others`: processors that other programs take before the context, and within it. Each takes 10 s, in which
        this process takes one processor."""
        before, meanwhile = others
        busy = [0.0, 10 + 10 * before, 10 + 10 * before, 20 + 10 * before + 10 * meanwhile]
        self._readings = {"time": [0.0, 10.0, 10.0, 20.0], "busy": busy, "own": [0.0, 10.0, 10.0, 20.0]}
        monkeypatch.setattr("time.monotonic", lambda: self._readings["time"].pop(0))
        monkeypatch.setattr("time.sleep", lambda _: None)
        monkeypatch.setattr(quiet, "busy_seconds", lambda: self._readings["busy"].pop(0))
        monkeypatch.setattr(quiet, "_own_seconds", lambda: self._readings["own"].pop(0))


def test_a_quiet_machine_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    Seconds(monkeypatch, others=(0.05, 0.1))
    with quiet_machine():
        measured = True
    assert measured


def test_other_programs_before_a_measurement_refuse_it(monkeypatch: pytest.MonkeyPatch) -> None:
    Seconds(monkeypatch, others=(0.5, 0.0))
    with (
        pytest.raises(SystemExit, match=r"other programs take 0\.5 processors, more than 0\.1: end them"),
        quiet_machine(),
    ):
        pytest.fail("the measurement ran")


def test_other_programs_during_a_measurement_refuse_its_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    Seconds(monkeypatch, others=(0.0, 0.5))
    refusal = r"took 0\.5 processors during the measurement, .* measure again"
    with pytest.raises(SystemExit, match=refusal), quiet_machine():
        pass


def test_the_error_of_a_measurement_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    Seconds(monkeypatch, others=(0.0, 0.5))
    with pytest.raises(ValueError, match="of the measurement"), quiet_machine():
        raise ValueError("of the measurement")
