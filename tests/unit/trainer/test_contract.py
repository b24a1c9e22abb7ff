"""A pod whose image is older than what the operator asks for says so, and its job is not tried again."""

import json
import os
import subprocess
import sys
from pathlib import Path

from pseudoreal_api.wire.contract import CONTRACT
from pseudoreal_api.wire.messages import ExitCode, TerminationMessage


def test_a_pod_that_is_asked_for_a_later_contract_refuses_the_job(tmp_path: Path) -> None:
    asked = {"contractVersion": CONTRACT + 1, "needs": {"optimizer.later": CONTRACT + 1}}
    config = asked | {"stage": "train", "phase": "real", "execution": 3, "later": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environment = os.environ | {"PSEUDOREAL_TERMINATION_LOG": str(tmp_path / "termination")}
    command = [sys.executable, "-m", "pseudoreal_trainer.cli.pod", str(tmp_path / "config.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == ExitCode.INVALID_JOB, done.stderr
    message = TerminationMessage.model_validate_json((tmp_path / "termination").read_text())
    assert (message.outcome, message.phase, message.execution) == ("InvalidJob", "real", 3)
    assert f"the operator asks for contract {CONTRACT + 1}, for optimizer.later; set spec.pod.image" in message.message
