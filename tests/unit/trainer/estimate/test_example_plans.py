"""The jobs of examples/gpu fit the machines that they name. Their comments and the table of docs/gpus.md say what the
planner says now; `python -m tests.plans` writes both."""

import re
from pathlib import Path

import pytest
import torch
from pseudoreal_api.quantity import bytes_of
from pseudoreal_trainer.cli.job_file import parse_job

from tests.plans import PAGE, example_files, plan_of, with_plan, with_table

FILES = pytest.mark.parametrize("file", example_files(), ids=lambda file: file.stem)
LEAST_DRIVER = {13: "580"}
"""Major version of CUDA -> the first branch of NVIDIA's Linux drivers that supports it, from CUDA's release notes."""


@FILES
def test_plan_in_the_comments_of_an_example_is_up_to_date(file: Path) -> None:
    assert file.read_text() == with_plan(file)


@FILES
def test_example_fits_the_memory_of_its_machine_and_of_its_pods(file: Path) -> None:
    job = parse_job(file)
    shared = bytes_of(job.spec.network.shared_memory or "0")
    for phase, planned in zip(job.spec.phases, plan_of(file).phases, strict=True):
        report, processes = planned.report, planned.config.processes_per_worker
        assert report.fits, report.reasons
        assert report.bytes.host * processes + shared < bytes_of(phase.resources.requests["memory"])
        if report.bytes.disk:
            assert phase.offload.volume is not None
            spec = phase.offload.volume["ephemeral"]["volumeClaimTemplate"]["spec"]
            assert report.bytes.disk * processes < bytes_of(spec["resources"]["requests"]["storage"])


def test_table_of_the_plans_is_up_to_date() -> None:
    assert PAGE.read_text() == with_table(PAGE.read_text())


def test_page_names_the_driver_and_the_gpus_that_the_locked_torch_needs() -> None:
    text, lock = " ".join(PAGE.read_text().split()), (PAGE.parents[1] / "requirements" / "trainer.txt").read_text()
    torch_version = _locked("torch", lock)
    cuda = _locked("cuda-toolkit", lock)
    major = int(cuda.partition(".")[0])
    assert f"torch {torch_version} with CUDA {'.'.join(cuda.split('.')[:2])}" in text
    assert f"driver {LEAST_DRIVER[major]} or newer" in text
    assert torch.__version__.partition("+")[0] == torch_version, "the tests run with the locked torch"
    if architectures := [name.removeprefix("sm_") for name in torch.cuda.get_arch_list() if name.startswith("sm_")]:
        assert f"code for compute capabilities {_listed(architectures)}" in text


def _locked(package: str, lock: str) -> str:
    found = re.search(rf"^{package}==([0-9.]+)", lock, re.MULTILINE)
    assert found is not None, f"requirements/trainer.txt has no {package}"
    return found[1]


def _listed(architectures: list[str]) -> str:
    *first, last = [f"{name[:-1]}.{name[-1]}" for name in architectures]
    return f"{', '.join(first)} and {last}"
