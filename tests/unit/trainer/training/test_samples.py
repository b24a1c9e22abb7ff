"""Texts sampled from fixed prompts at validations: logged in metrics, equal after a restart, without side effects."""

import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from pseudoreal_trainer.model.sampling import Sampling, generate
from pseudoreal_trainer.model.transformer import Transformer
from pseudoreal_trainer.training.metrics_file import metrics_of, truncate_after
from pseudoreal_trainer.training.start import load_weights

from tests.support.checkpoints import assert_same, metrics, newest_of

PROMPTS = ["and the", "lord ünto"]
TOKENS, SEED = 7, 5


@pytest.fixture
def prompted(job_body: Any) -> Any:
    validation = job_body["spec"]["data"]["validation"]
    validation["samples"] = {"prompts": PROMPTS, "tokens": TOKENS, "seed": SEED}
    return validation


@pytest.mark.usefixtures("prompted")
def test_the_last_samples_equal_those_generated_from_the_checkpoint(config: Any, train: Any) -> None:
    with structlog.testing.capture_logs() as said:
        train(config(0))
    lines = metrics(config(0))
    assert [line["step"] for line in lines if line["samples"]] == [4, 6], "samples are written at each validation"
    phase = config(0)
    model = Transformer(phase.model, phase.sharing).double()
    load_weights(model, newest_of(phase))
    expected = []
    for number, prompt in enumerate(PROMPTS):
        sampling = Sampling(256, seed=SEED + number)
        written = generate(model, [*prompt.encode()], TOKENS, phase.model.sequence_length, sampling)
        expected.append({"prompt": prompt, "text": bytes(written).decode(errors="replace")})
    assert lines[-1]["samples"] == expected
    assert lines[3]["samples"] != expected, "earlier weights write other texts"
    assert [line["step"] for line in said if line["event"] == "samples"] == [4, 6]


def test_samples_change_no_loss_and_no_weight(prompted: Any, config: Any, train: Any) -> None:
    train(config(0, "with"))
    del prompted["samples"]
    train(config(0, "without"))
    assert_same(newest_of(config(0, "with")), newest_of(config(0, "without")))
    for key in ("loss", "validation_loss", "gradient_norm", "global_cursor"):
        values = [[line[key] for line in metrics(config(0, work))] for work in ("with", "without")]
        assert values[0] == values[1]


@pytest.mark.usefixtures("prompted")
def test_a_stopped_and_resumed_run_generates_the_same_samples(config: Any, train: Any) -> None:
    train(config(0, "undisturbed"))
    assert train(config(0), iter([False, False, False, True]).__next__).step == 4
    train(config(0, execution=2))
    written = [[line["samples"] for line in metrics(config(0, work))] for work in ("undisturbed", "work")]
    assert written[0] == written[1]


def test_ends_of_lines_in_a_text_cut_no_line_of_the_metrics(prompted: Any, config: Any, train: Any) -> None:
    """str.splitlines splits at these characters, JSON Lines does not."""
    prompted["samples"]["prompts"] = ["and\u2028the", "lord\x85\u2029"]
    assert train(config(0), iter([False, False, False, True]).__next__).step == 4
    train(config(0, execution=2))
    file = Path(config(0).work_directory) / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in (lines[3], lines[5]):
        assert [sample["prompt"] for sample in line["samples"]] == prompted["samples"]["prompts"]


def test_metrics_lines_with_unusual_line_ends_are_kept(tmp_path: Path) -> None:
    """Earlier releases wrote such lines unescaped; a crash may have cut off the last line."""
    file = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "text": "a\u2028b\x85c"}, ensure_ascii=False) for step in (1, 2, 3)]
    file.write_text("\n".join([*lines, '{"step": 4, "te']))
    assert [*metrics_of(tmp_path)][:3] == lines
    truncate_after(file, 9)
    assert file.read_text() == "".join(line + "\n" for line in lines)
    file.write_text("\n".join(lines))
    truncate_after(file, 3)
    truncate_after(file, 2)
    assert [*metrics_of(tmp_path)] == lines[:2]
