"""`make demo DEMO=llama`, judged by its output and by the objects left on the cluster. The demo itself checks its
results."""

import json
import re

import pytest

from tests.e2e.conftest import Demo
from tests.e2e.support import machine
from tests.e2e.support.job import NAMESPACE, Job

pytestmark = [pytest.mark.e2e, pytest.mark.long]
JOB = "llama"


def test_it_trained_on_two_pods_in_both_phases(llama: Demo) -> None:
    status = Job(llama.kubernetes, JOB, f"{JOB}-checkpoints").status()
    assert [(phase.name, phase.state) for phase in status.phases] == [("pseudo", "Complete"), ("real", "Complete")]
    assert status.restarts == 0, "pods that wait for the text are no fault"
    jobs = llama.kubernetes.items("jobs", f"--namespace={NAMESPACE}", f"--selector=pseudoreal.dev/job-name={JOB}")
    stages = [(job["metadata"]["labels"]["pseudoreal.dev/stage"], job["spec"]["completions"]) for job in jobs]
    assert sorted(stages) == [("delink", 1), ("train", 2), ("train", 2)]


@pytest.mark.usefixtures("llama")
def test_the_tokenizer_has_a_vocabulary_of_the_texts_own() -> None:
    index = json.loads((machine.volume(f"{JOB}-data") / "train" / "index.json").read_text())
    assert 14_500 < index["vocabulary"] <= 16_384
    assert index["textBytes"] > 4_000_000


def test_the_output_shows_what_people_want_to_see(llama: Demo) -> None:
    output = llama.output
    assert re.search(r"tokenizer/tokenizer.json: 1\d,\d{3} tokens", output)
    assert "Losses, in nats per token" in output
    assert re.search(r"validation loss \d\.\d{4} nats per token, \d\.\d{3} bits per byte; it began with \d", output)
    assert re.search(r"transformers finds \d\.\d{4} with the exported model", output)
    assert len(re.findall(r"^step +\d+  And it came to pass", output, re.MULTILINE)) == 6, "at each validation"
    assert "A sample of what it writes, in transformers" in output
    assert re.search(r"[\d,]+ model.safetensors", output)
    steps = [int(step) for step in re.findall(r"step (\d+)/\d+  loss", output)]
    assert len(set(steps)) >= 5
    assert steps == sorted(steps)
