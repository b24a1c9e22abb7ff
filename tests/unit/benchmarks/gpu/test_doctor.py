"""The doctor names each fault of a machine with its remedy, whatever a check does."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from pseudoreal_trainer.engine.ranks.process_groups import create_process_groups
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.preflight import probes

from benchmarks.gpu import doctor
from benchmarks.gpu.doctor import Check, FaultError, NotTriedError, examine, examine_apart
from benchmarks.gpu.findings import Findings
from tests.unit.trainer.engine.races.support.emulation import Emulation
from tests.unit.trainer.engine.races.support.recording import RecordingMachine, RecordingNetwork
from tests.unit.trainer.engine.support import reference, running
from tests.unit.trainer.engine.support.cases import Case

CPU = torch.device("cpu")
HOMES = {"d": "device", "h": "host", "D": "disk"}


def check_that(run: Callable[[torch.device], str]) -> Check:
    return Check("copies", run, "look at the link")


def raises(error: Exception) -> Callable[[torch.device], str]:
    def run(_: torch.device) -> str:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "outcome", "text"),
    [
        (lambda _: "9 GB/s", "passed", "9 GB/s"),
        (raises(NotTriedError("one device")), "not tried", "one device"),
        (raises(FaultError("copies run at 1 GB/s")), "failed", "copies run at 1 GB/s: look at the link"),
        (raises(RuntimeError("CUDA error 999\n")), "failed", "RuntimeError: CUDA error 999: look at the link"),
    ],
)
def test_a_check_ends_in_a_finding(run: Callable[[torch.device], str], outcome: str, text: str) -> None:
    found = examine(check_that(run), CPU)
    assert (found.check, found.outcome, found.text) == ("copies", outcome, text)


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import time; time.sleep(600)", "the check did not end in 1 s: look at the link"),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the check was ended by signal 11: look at the link",
        ),
        ("raise SystemExit(3)", "the check ended with exit code 3: look at the link"),
    ],
)
def test_a_check_that_hangs_or_crashes_is_a_failure(monkeypatch: pytest.MonkeyPatch, program: str, text: str) -> None:
    monkeypatch.setattr(doctor, "_COMMAND", (sys.executable, "-c", program))
    limit = 1.0 if "sleep" in program else 60.0
    found = examine_apart(check_that(lambda _: ""), "cpu", limit)
    assert (found.outcome, found.text) == ("failed", text)


def test_without_time_nothing_is_tried() -> None:
    assert examine_apart(check_that(raises(AssertionError())), "cpu", 0.0).outcome == "not tried"


def test_a_check_by_name_writes_its_finding(tmp_path: Path) -> None:
    assert doctor.main(["--device", "cpu", "--check", "products", "--out", str(tmp_path / "found.json")]) == 0
    [found] = Findings.validate_json((tmp_path / "found.json").read_bytes())
    assert (found.check, found.outcome) == ("products", "passed")
    assert found.text.startswith("cpu: exact, ")


def test_wrong_products_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "multiply", lambda left, right: left @ right + 1)
    with pytest.raises(FaultError, match="cpu multiplies matrices of small integers wrongly"):
        doctor.products(CPU)


@pytest.mark.parametrize("home", HOMES)
def test_steps_from_each_home_agree_on_an_emulated_gpu(home: str) -> None:
    assert on_emulated_gpu(doctor.steps_from(home)).startswith("losses differ from the CPU's by ")


def test_steps_with_other_losses_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    train = reference.train

    def slightly_other(case: object) -> object:
        losses, weights = train(case)  # type: ignore[arg-type]
        return [losses[0], losses[1] * (1 + 1e-8), *losses[2:]], weights

    monkeypatch.setattr(reference, "train", slightly_other)
    with pytest.raises(FaultError, match=r"losses differ from the CPU's by 1\.0e-08, more than 1e-10"):
        on_emulated_gpu(doctor.steps_from("h"))


@pytest.fixture
def default_kernels() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


@pytest.mark.usefixtures("default_kernels")
def test_repeated_steps_have_the_same_bits_or_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    assert doctor.repeated_steps(CPU).startswith("two runs end with the same bits; they take ")
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    runs = iter(range(4))

    def drifting(case: Case, ranks: Ranks, folder: Path) -> running.Result:
        found = running.run_case(case, ranks, folder)
        found.weights["head.weight"][0, 0] += next(runs) * 2.0**-20
        return found

    monkeypatch.setattr(doctor, "run_case", drifting)
    with pytest.raises(FaultError, match="two runs of the same steps end with different bits"):
        doctor.repeated_steps(CPU)


def on_emulated_gpu(run: Callable[[torch.device], str]) -> str:
    machine, found = RecordingMachine("cuda", None), list[str]()
    with patch.object(running, "process_groups_of", create_process_groups):
        Emulation(machine, RecordingNetwork(machine, 1)).run(lambda _: found.append(run(machine.rank.device)), 1)
    assert not machine.detector.races
    return found[0]
