"""lm-evaluation-harness gives the same scores for an exported model as our own model in float64."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.training.start import load_weights

LENGTH, NEWLINE = 64, 10
QUESTIONS = [
    {"question": "the king of", "choices": ["israel", "zzqx", "the the lord"], "answer": 0},
    {"question": "and it came to pass that", "choices": ["day.", "house of israel", "~"], "answer": 1},
    {"question": "unto the", "choices": ["lord", "lord king", "00000"], "answer": 2},
    {"question": "shall", "choices": ["and", "q"], "answer": 0},
]
TEXTS = ["the lord of the house", "and the king came unto israel. " * 7, "ünïcode 世界 " * 9]
"""The second and the third text are longer than the model's sequence."""


@pytest.fixture
def trained(job_body: Any, config: Any, train: Any, tmp_path: Path) -> Reader:
    """Return a checkpoint of a small Llama that knows a few words."""
    spec = job_body["spec"]
    spec["model"] |= {"sequenceLength": LENGTH, "feedForward": {"size": 32, "activation": "SwiGLU"}}
    spec["precision"] = {"compute": "float32"}
    spec["phases"][0]["until"] = {"step": 30}
    spec["phases"][1]["until"] = {"step": 31}
    train(config(0))
    found = CheckpointStore(tmp_path / "work", "11111111-2222").newest("pseudo")
    assert found is not None
    return found


@pytest.mark.long
def test_the_harness_finds_what_our_model_computes(trained: Reader, tmp_path: Path) -> None:
    exported = tmp_path / "exported"
    checkpoint = str(trained.checkpoints / trained.manifest.name)
    arguments = ["export", checkpoint, "--format", "huggingface", "--output", str(exported)]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    results = _judged(exported, tmp_path)
    model = Transformer(trained.manifest.model, trained.manifest.sharing)
    load_weights(model, trained)
    model = model.double()
    _assert_choices(results, model, tmp_path)
    _assert_texts(results, model, tmp_path)


def _assert_choices(results: Any, model: Transformer, folder: Path) -> None:
    samples = _samples(folder, "choices")
    assert len(samples) == len(QUESTIONS)
    right = normalised = 0
    for question, sample in zip(QUESTIONS, samples, strict=True):
        assert sample["doc"] == question
        expected = [_continued(model, str(question["question"]), f" {choice}") for choice in question["choices"]]  # type: ignore[attr-defined]
        found = [float(response[0][0]) for response in sample["resps"]]
        assert found == pytest.approx(expected, abs=2e-4)
        right += _best(expected) == question["answer"]
        per_character = [e / len(c) for e, c in zip(expected, question["choices"], strict=True)]  # type: ignore[call-overload]
        normalised += _best(per_character) == question["answer"]
    assert results["choices"]["acc,none"] == pytest.approx(right / len(QUESTIONS))
    assert results["choices"]["acc_norm,none"] == pytest.approx(normalised / len(QUESTIONS))


def _assert_texts(results: Any, model: Transformer, folder: Path) -> None:
    expected = [_rolling(model, text.encode()) for text in TEXTS]
    found = [float(sample["resps"][0][0]) for sample in _samples(folder, "texts")]
    assert found == pytest.approx(expected, abs=2e-3)
    size = sum(len(text.encode()) for text in TEXTS)
    assert results["texts"]["bits_per_byte,none"] == pytest.approx(-sum(expected) / size / math.log(2), rel=1e-5)
    assert results["texts"]["byte_perplexity,none"] == pytest.approx(math.exp(-sum(expected) / size), rel=1e-5)


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=lambda index: scores[index])


def _continued(model: Transformer, context: str, continuation: str) -> float:
    """Return the log-likelihood of a continuation in nats."""
    return _logarithm(model, [*context.encode()], [*continuation.encode()])


def _rolling(model: Transformer, text: bytes) -> float:
    """Return the log-likelihood of a text in nats. Tokens are scored in stretches of the model's length, each after one
    token of context; the last, shorter stretch has as much context as fits."""
    tokens, total = [NEWLINE, *text], 0.0
    for begin in range(1, len(tokens), LENGTH):
        end = min(begin + LENGTH, len(tokens))
        first = begin - 1 if begin == 1 or end - begin == LENGTH else end - LENGTH - 1
        total += _logarithm(model, tokens[first:begin], tokens[begin:end])
    return total


@torch.no_grad()
def _logarithm(model: Transformer, context: list[int], following: list[int]) -> float:
    tokens = torch.tensor([context + following])
    logarithms = torch.log_softmax(model(tokens[:, :-1])[0].double(), dim=-1)
    places = torch.arange(len(context) - 1, tokens.shape[1] - 1)
    return float(logarithms[places, tokens[0, places + 1]].sum())


def _judged(exported: Path, folder: Path) -> Any:
    """Return the harness's results of both tasks, computed without network access."""
    tasks = folder / "tasks"
    tasks.mkdir()
    for name, rows in (("choices", QUESTIONS), ("texts", [{"text": text} for text in TEXTS])):
        (tasks / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _task(tasks, "choices", CHOICES)
    _task(tasks, "texts", ROLLING)
    settings = f"pretrained={exported},dtype=float32,prefix_token_id={NEWLINE},max_length={LENGTH}"
    command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", settings, "--device", "cpu"]
    command += ["--tasks", "choices,texts", "--include_path", str(tasks), "--output_path", str(folder / "results")]
    alone = {"HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--log_samples"], env=os.environ | alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (results,) = (folder / "results").rglob("results_*.json")
    return json.loads(results.read_text())["results"]


def _task(folder: Path, name: str, fields: dict[str, Any]) -> None:
    files = {"data_files": {"test": str(folder / f"{name}.jsonl")}}
    common = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test"}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | fields))


CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
}


def _samples(folder: Path, task: str) -> list[Any]:
    """Return the harness's records of each question of a task, in order."""
    (file,) = (folder / "results").rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
