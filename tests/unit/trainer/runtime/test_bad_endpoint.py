"""A report endpoint that is down, slow or wrong does not affect the training that reports to it."""

import json
import urllib.request
from itertools import count
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.support.pods import Pod
from tests.support.ports import free_port
from tests.unit.trainer.runtime.support.reporting_pod import NAME, reporting_pod
from tests.unit.trainer.runtime.support.server import Server, serving

MANNERS = ["500", "hangs", "429", "garbage", "no http", "down"]
STEPS = 5
"""Minimum number of training steps while the endpoint behaves in one manner."""


def _losses(work: Path) -> list[float]:
    metrics = work / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [json.loads(line)["loss"] for line in lines if line.endswith("}")]


def _events(pod: Pod) -> list[str]:
    lines = pod.said().splitlines()
    events = [json.loads(line)["event"] for line in lines if line.startswith("{")]
    return [event for event in events if event.startswith("reports_")]


def _take_on(manner: str, server: Server, pod: Pod, work: Path) -> None:
    """Let the server behave in `manner` until reports have met it, steps were trained, and the pod has logged the
    change."""
    said = len(_events(pod))
    with server.changed:
        server.manner, met, made = manner, server.seen[manner], len(_losses(work))
    if manner == "down":
        server.stop()
    else:
        server.wait_for(lambda: server.seen[manner] > met)
    server.wait_for(lambda: len(_losses(work)) >= made + STEPS)
    if manner == "hangs":
        # The pod's request hangs; closing the connection ends the request, and the pod logs the failure.
        server.stop()
    server.wait_for(lambda: len(_events(pod)) > said)
    if manner in ("hangs", "down"):
        server.manner = "answers"
        server.start()


def _scraped(port: int) -> dict[str, float]:
    """Return the pod's Prometheus samples by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {sample.name: sample.value for family in families for sample in family.samples}


def test_the_losses_are_those_without_one(job_body: dict[str, Any], config: Any, train: Any, tmp_path: Path) -> None:
    spec = job_body["spec"]
    spec["data"]["validation"] |= {"everySteps": 10**8, "sequences": 2}
    spec["checkpoint"]["everySteps"] = 10**8
    for phase, steps in zip(spec["phases"], (10**8, 10**8 + 1), strict=True):
        phase["until"] = {"step": steps}
    work, port = tmp_path / "reporting", free_port()
    with serving(tmp_path) as server, reporting_pod(config(0, work.name), server, tmp_path, port) as pod:
        server.wait_for(lambda: _losses(work))
        server.wait_for(lambda: _scraped(port).get("pseudoreal_trainer_step", 0) > 0)
        scraped = _scraped(port)
        for manner in MANNERS:
            _take_on(manner, server, pod, work)
            _take_on("answers", server, pod, work)
        server.finishes = {NAME}
        assert pod.wait() == 0
        message, events = pod.message(), _events(pod)
    assert message["outcome"] == "Succeeded"
    assert scraped["pseudoreal_trainer_loss"] in _losses(work)
    assert 0 < scraped["pseudoreal_trainer_step_seconds"] <= scraped["pseudoreal_trainer_steps_seconds_total"]
    assert scraped["pseudoreal_trainer_rank_step"] > 0
    assert events == ["reports_do_not_arrive", "reports_arrive_again"] * len(MANNERS)
    made = count(1)
    train(config(0, "alone"), stop=lambda: next(made) == message["step"])
    assert _losses(work) == _losses(tmp_path / "alone")
    assert len(_losses(work)) == message["step"] >= 2 * len(MANNERS) * STEPS
