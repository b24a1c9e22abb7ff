from dataclasses import replace
from pathlib import Path

import pytest
from pseudoreal_dev.cluster.preflight import GIB, Machine, problems
from pseudoreal_dev.machine import go

FIT = Machine(
    system="Linux",
    is_root=True,
    disk_free=80 * GIB,
    memory_available=16 * GIB,
    has_apt_get=True,
    missing_packages=("containerd",),
    go="1.26.1",
    go_required="1.25.0",
    is_warm=False,
    cache=Path("/cache"),
)


def test_a_fit_machine_has_no_problem() -> None:
    assert problems(FIT) == []


@pytest.mark.parametrize(
    ("change", "missing", "remedy"),
    [
        ({"system": "Darwin"}, "Darwin", "Linux machine"),
        ({"is_root": False}, "not root", "sudo"),
        ({"disk_free": 39 * GIB}, "39 GiB are free at /cache, and 40 are needed", "PSEUDOREAL_CACHE"),
        ({"disk_free": 9 * GIB, "is_warm": True}, "and 10 are needed", "PSEUDOREAL_CACHE"),
        ({"memory_available": 5 * GIB}, "5.0 GiB of memory", "6 GiB"),
        ({"has_apt_get": False, "missing_packages": ("containerd", "runc")}, "containerd, runc", "Install containerd"),
        ({"go": ""}, "Go is missing", "Go 1.25.0 or newer"),
        ({"go": "1.9.7"}, "Go is 1.9.7", "Go 1.25.0 or newer"),
        ({"cache": Path("/" + "long/" * 20)}, "longer than", "PSEUDOREAL_CACHE"),
    ],
)
def test_each_lack_is_named_with_its_remedy(change: dict[str, object], missing: str, remedy: str) -> None:
    (problem,) = problems(replace(FIT, **change))  # type: ignore[arg-type]
    assert missing in problem.missing
    assert remedy in problem.remedy


def test_less_disk_is_enough_when_the_cache_is_warm() -> None:
    assert problems(replace(FIT, disk_free=20 * GIB, is_warm=True)) == []


def test_all_problems_are_told_at_once() -> None:
    assert len(problems(replace(FIT, is_root=False, disk_free=0, memory_available=0, go=""))) == 4


def test_an_older_go_fetches_the_one_that_is_needed_unless_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ubuntu 24.04 has Go 1.22, Debian 13 has 1.24."""
    monkeypatch.setattr(go, "TOOLCHAIN", "auto")
    assert go.oldest_for("1.25.0") == "1.21.0"
    monkeypatch.setattr(go, "TOOLCHAIN", "local")
    assert go.oldest_for("1.25.0") == "1.25.0"
