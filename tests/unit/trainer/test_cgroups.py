import os
from pathlib import Path
from typing import Any

import pytest
from pseudoreal_trainer import cgroups
from pseudoreal_trainer.cgroups import threads_of, usable_processors
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.ranks import torchrun_environment
from pseudoreal_trainer.runtime.rendezvous.identity import RendezvousIdentity


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "1000 100000\n"}, 1),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu.max": "max\n"}, 8),
        ({"cpu.max": "many 100000\n"}, 8),
        ({"cpu.max": "100000 0\n"}, 8),
        ({"cpu.max": ""}, 8),
        ({"cpu/cpu.cfs_quota_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_usable_processors_respect_the_limit_of_the_container(
    files: dict[str, str], expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert usable_processors(tmp_path) == expected


@pytest.mark.parametrize(("ranks", "expected"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_the_threads_of_ranks_share_the_limit_of_their_pod(
    ranks: int, expected: int, config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)))
    monkeypatch.setattr(cgroups, "_GROUPS", tmp_path)
    (tmp_path / "cpu.max").write_text("600000 100000\n")
    assert threads_of(ranks) == expected
    phase = config(0).model_copy(update={"processes_per_worker": ranks})
    environment = torchrun_environment(phase, PodFolder(tmp_path), RendezvousIdentity(0, 0, 0, 0))
    assert environment["OMP_NUM_THREADS"] == str(expected)
