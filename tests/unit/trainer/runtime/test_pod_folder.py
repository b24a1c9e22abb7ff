"""Contents of a pod's folder that survive a restart of its ranks in place."""

import os
from math import nan
from pathlib import Path

from pseudoreal_api.wire.messages import InPlace, TerminationMessage
from pseudoreal_trainer.runtime.failures import read_crashes
from pseudoreal_trainer.runtime.heartbeat import HeartbeatFile
from pseudoreal_trainer.runtime.pod_folder import PodFolder
from pseudoreal_trainer.runtime.reports import pod_report
from pseudoreal_trainer.runtime.termination import collect_outcomes, write_outcome

WHY = InPlace(restarts=1, peer_lost=False, message="local rank 0 ended without a message")


def _begin(folder: PodFolder) -> None:
    HeartbeatFile(folder.heartbeat(0), os.getpid(), 4).write("computing", "a step", 0.0, 7, nan, nan)


def test_files_of_ranks_before_a_restart_are_removed(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path)
    assert (folder.has_ranks(), folder.in_place()) == (False, None)
    _begin(folder)
    write_outcome(tmp_path, 0, TerminationMessage(outcome="Failed", phase="real", execution=1))
    (tmp_path / "0.crash").write_text("Fatal Python error: Aborted\n")
    folder.write_checkpoint("real-7", 7)
    folder.ask_to_finish()
    assert folder.has_ranks()
    folder.remove_rank_files(WHY)
    assert (folder.has_ranks(), collect_outcomes(tmp_path), read_crashes(tmp_path, 1)) == (False, [], {})
    assert folder.is_asked_to_finish()
    report = pod_report(folder)
    assert (report.ranks, report.in_place) == ([], WHY)
    assert report.checkpoint is not None
    _begin(folder)
    assert [rank.rank for rank in pod_report(folder).ranks] == [4]


def test_the_count_of_restarts_in_other_pods_is_kept_and_is_no_file_of_a_rank(tmp_path: Path) -> None:
    folder = PodFolder(tmp_path)
    assert folder.restarts_elsewhere() == 0
    folder.write_restarts_elsewhere(2)
    assert (folder.restarts_elsewhere(), folder.has_ranks()) == (2, False)
