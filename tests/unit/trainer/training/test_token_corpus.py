"""Jobs that train on token files: sample order, restarts, phases with other mixtures, validation sets, rejections."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from click.testing import CliRunner
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.data.token_corpus import TokenCorpus, open_corpus
from pseudoreal_trainer.data.tokenizer.byte_characters import BYTE_CHARACTERS
from pseudoreal_trainer.data.tokens.native import read_index, write_index
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.model.transformer import build_model
from pseudoreal_trainer.training.schedule import learning_rate
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.support.checkpoints import assert_same, metrics, newest_of
from tests.unit.trainer.data.support.slow_permutation import permuted
from tests.unit.trainer.data.support.written import write_native

T = 16
"""`model.sequenceLength` of `job_body`."""
SIZES = {"web": 403, "code": 245, "wiki": 100, "books": 81}
"""Number of tokens by name; the first two are sources, the others validation sets."""
SLOTS = ["web", "code", "web", "web", "code"]
"""Sources of one period's samples for the weights 3 and 2, worked out by hand."""


def tokens_of(name: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    random = np.random.default_rng(int.from_bytes(name.encode(), "little") % 2**32)
    return random.integers(0, 256, SIZES[name])


@pytest.fixture(autouse=True)
def job(job_body: Any, tmp_path: Path) -> Any:
    folder = tmp_path / "tokens"
    for name in SIZES:
        write_native(folder / name, documents_of(tokens_of(name)))
    job_body["spec"]["data"] = {
        "path": str(folder),
        "sources": [{"name": "web", "weight": 3}, {"name": "code", "weight": 2}],
        "validation": {"everySteps": 4, "sequences": 3, "sets": [{"name": "wiki"}, {"name": "books"}]},
    }
    return job_body


def documents_of(tokens: Any) -> list[Any]:
    """Cut the tokens into two documents; the eighth token and the last one become their end tokens."""
    return [tokens[:7].clip(1), tokens[8:-1].clip(1)]


def written(name: str) -> list[int]:
    """Return the tokens as the files hold them: the eighth token and the last one end a document."""
    tokens = tokens_of(name).clip(1).tolist()
    return [*tokens[:7], 0, *tokens[8:-1], 0]


def sample(name: str, number: int) -> list[int]:
    """Return sample `number` of a source, counted since the job's start; computed with Python integers."""
    samples = (SIZES[name] - 1) // T
    key = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    first = T * permuted(number % samples, samples, 0, number // samples, key)
    return written(name)[first : first + T + 1]


def stream(cursors: int) -> list[list[int]]:
    taken, found = dict.fromkeys(SIZES, 0), []
    for cursor in range(cursors):
        name = SLOTS[cursor % len(SLOTS)]
        found.append(sample(name, taken[name]))
        taken[name] += 1
    return found


def reference(config: PhaseConfig) -> tuple[list[float], dict[str, float]]:
    """Train in a plain PyTorch loop; return the losses of six steps of six samples, and the final validation losses."""
    model = build_model(config.model, config.sharing, config.data.seed, torch.float64)
    optimizer = adamw(model.parameters(), config.optimizer, 0.0)
    samples, losses = torch.tensor(stream(36)), []
    for step, windows in enumerate(samples.split(6), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step, config.total_steps)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    validated = {}
    for name in ("wiki", "books"):
        available = (SIZES[name] - 1) // T
        windows = torch.tensor([written(name)[T * (i * available // 3) :][: T + 1] for i in range(3)])
        with torch.no_grad():
            loss = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
        validated[name] = loss.item()
    return losses, validated


def test_losses_are_those_of_a_plain_loop_over_the_mixture(config: Any, train: Any) -> None:
    message = train(config(0))
    losses, validated = reference(config(0))
    lines = metrics(config(0))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-13)
    assert lines[-1]["validation_losses"] == pytest.approx(validated, rel=1e-13)
    # One of the 48 targets of each set ends a document and stands for no byte.
    bits = {name: loss * 48 / math.log(2) / 47 for name, loss in validated.items()}
    assert lines[-1]["bits_per_byte"] == pytest.approx(bits, rel=1e-13)
    assert message.validation_loss == lines[-1]["validation_losses"]["wiki"], (
        "the first set's loss is the job's validation loss"
    )
    assert [line["validation_losses"] is None for line in lines] == [True, True, True, False, True, False]
    assert all(line["data_seconds"] >= 0 for line in lines)


def test_a_restart_at_any_step_and_another_mixture_repeat_and_skip_nothing(job: Any, config: Any, train: Any) -> None:
    """The first phase is stopped after every step; the second phase reads only the source code."""
    job["spec"]["phases"][1]["mixture"] = [{"source": "code", "weight": 1}]
    whole, parts = config(0, "whole"), config(0, "parts")
    train(whole)
    for step in range(1, 6):
        calls = count(1)
        assert train(parts, lambda calls=calls: next(calls) >= 1).step == step
    train(parts)
    assert_same(newest_of(whole), newest_of(parts))
    manifest = newest_of(parts).manifest
    assert manifest.consumed == {"web": 22, "code": 14}, "36 samples are 7 periods and one sample"
    after = CheckpointStore(Path(whole.work_directory), "11111111-2222")
    assert after.committed("pseudo")[-1].consumed == manifest.consumed


def test_the_next_phase_goes_on_in_each_source(job: Any, config: Any, train_job: Any) -> None:
    job["spec"]["phases"][1]["mixture"] = [{"source": "code", "weight": 5}]
    train_job("work")
    assert newest_of(config(1)).manifest.consumed == {"web": 22, "code": 14 + 36}


@pytest.fixture
def train_job(config: Any, delink_of: Any, train: Any) -> Callable[[str], Any]:
    from pseudoreal_trainer.checkpoint.delink import delink

    def run(work: str) -> Any:
        train(config(0, work))
        delink(delink_of(1, work))
        return train(config(1, work))

    return run


def test_a_source_that_was_written_anew_is_refused(config: Any, train: Any, tmp_path: Path) -> None:
    train(config(0), lambda: True)
    other = tokens_of("web")
    other[9] ^= 1
    folder = tmp_path / "tokens" / "web"
    folder.rename(tmp_path / "before")
    write_native(folder, documents_of(other))
    with pytest.raises(InvalidJobError, match="not the one that checkpoint pseudo-00000001 was trained on"):
        train(config(0, execution=2))


def test_a_job_that_would_read_a_source_too_often_is_refused_when_it_starts(job: Any, config: Any, train: Any) -> None:
    """Each phase reads 36 samples, 14 of them from code; an epoch of code has 15."""
    job["spec"]["data"]["sources"][1]["maxEpochs"] = 1
    with pytest.raises(InvalidJobError, match=r"reads 28 samples of the source code, which has 15: that is 1.87"):
        train(config(0))
    job["spec"]["data"]["sources"][1]["maxEpochs"] = 2
    assert train(config(0)).outcome == "Succeeded"


def test_a_source_that_is_not_there_is_named(job: Any, config: Any, train: Any) -> None:
    job["spec"]["data"]["sources"][1]["path"] = "nowhere"
    with pytest.raises(InvalidJobError, match=r"nowhere/index.json is not there"):
        train(config(0))


def write_tokenizer(folder: Path, sha256_to: Path | None = None) -> None:
    """Write a byte-level tokenizer.json. With `sha256_to`, the token files in that folder name this tokenizer as
    theirs."""
    folder.mkdir()
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    description = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }
    (folder / "tokenizer.json").write_text(json.dumps(description) + "\r\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": BYTE_CHARACTERS[0]}))
    sha256 = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    for name in SIZES if sha256_to else ():
        files = (sha256_to or folder) / name
        write_index(files, read_index(files).model_copy(update={"tokenizer": sha256}))


def test_files_of_another_tokenizer_are_refused(job: Any, config: Any, train: Any, tmp_path: Path) -> None:
    """This tokenizer has the same tokens in a different file."""
    write_tokenizer(tmp_path / "tokens" / "tokenizer")
    job["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    with pytest.raises(InvalidJobError, match=r"web was prepared with another tokenizer than spec.data.tok"):
        train(config(0))


def test_with_a_tokenizer_there_are_bits_per_byte_and_a_sample(
    job: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "tokens" / "tokenizer", sha256_to=tmp_path / "tokens")
    job["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    job["spec"]["data"]["validation"]["samples"] = {"prompts": ["And"], "tokens": 3}
    with structlog.testing.capture_logs() as said:
        train(config(0))
    assert metrics(config(0))[-1]["bits_per_byte"].keys() == {"wiki", "books"}
    assert [each["prompt"] for each in metrics(config(0))[-1]["samples"]] == ["And"]
    (sample,) = [line for line in said if line["event"] == "sample"]
    assert len(sample["prompt"]) > 0, "the sample's prompt is decoded to text"


@pytest.mark.parametrize("named", [{}, {"eos_token": BYTE_CHARACTERS[116]}])
def test_documents_end_as_the_files_say(
    named: dict[str, str], job: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    """The files were written by `data prepare --end-of-document` and the tokenizer names no end token, or another one.
    The end token stands for no byte."""
    write_tokenizer(tmp_path / "tokens" / "tokenizer", sha256_to=tmp_path / "tokens")
    job["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    train(config(0))
    expected = metrics(config(0))[-1]["bits_per_byte"]
    (tmp_path / "tokens" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    train(config(0, "given"))
    assert metrics(config(0, "given"))[-1]["bits_per_byte"] == expected
    checkpoint = str(tmp_path / "given" / "checkpoints" / "pseudo-00000006")
    assert CliRunner().invoke(main, ["sample", checkpoint, "--prompt", "In", "--tokens", "3"]).exit_code == 0


@pytest.mark.usefixtures("job")
def test_files_of_validation_sets_are_closed_again(config: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    corpus = open_corpus(config(0))
    assert isinstance(corpus, TokenCorpus)
    assert corpus.sets.keys() == {"wiki", "books"}
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.usefixtures("job")
def test_a_set_without_text_has_no_bits_per_byte(config: Any, train: Any, tmp_path: Path) -> None:
    """For instance, rows that packing has filled with empty documents."""
    shutil.rmtree(tmp_path / "tokens" / "books")
    write_native(tmp_path / "tokens" / "books", [[]] * 100)
    train(config(0))
    line = metrics(config(0))[-1]
    assert (line["validation_losses"].keys(), line["bits_per_byte"].keys()) == ({"wiki", "books"}, {"wiki"})


def test_the_tokenizer_is_kept_with_the_checkpoints(job: Any, config: Any, train: Any, tmp_path: Path) -> None:
    """Texts and exports need the tokenizer when the job's own files are gone."""
    folder = tmp_path / "tokens" / "tokenizer"
    write_tokenizer(folder, sha256_to=tmp_path / "tokens")
    job["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    job["spec"]["model"]["feedForward"]["activation"] = "SwiGLU"
    train(config(0))
    kept = (folder / "tokenizer.json").read_bytes()
    assert b"\r\n" in kept
    for file in folder.iterdir():
        file.unlink()
    checkpoint = str(tmp_path / "work" / "checkpoints" / "pseudo-00000006")
    written = CliRunner().invoke(main, ["sample", checkpoint, "--prompt", "In", "--tokens", "3"])
    assert (written.exit_code, written.output[:2]) == (0, "In")
    export = ["export", checkpoint, "--format", "huggingface", "--output"]
    assert CliRunner().invoke(main, [*export, str(tmp_path / "exported")]).exit_code == 0
    assert (tmp_path / "exported" / "tokenizer.json").read_bytes() == kept
    assert "eos_token" in (tmp_path / "exported" / "tokenizer_config.json").read_text()
    shutil.rmtree(tmp_path / "work" / "tokenizer")
    written = CliRunner().invoke(main, ["sample", checkpoint, "--prompt", "In"])
    assert (written.exit_code, "name their tokenizer with --tokenizer" in written.output) == (2, True)
    without = CliRunner().invoke(main, [*export, str(tmp_path / "without")])
    assert (without.exit_code, "no tokenizer is written" in without.output) == (0, True)
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    assert CliRunner().invoke(main, [*export, str(tmp_path / "bytes"), "--tokenizer", "bytes"]).exit_code == 0
    assert (tmp_path / "bytes" / "tokenizer.json").exists()


def test_where_the_tokenizer_is_not_named_there_are_no_bits_per_byte(config: Any, train: Any, tmp_path: Path) -> None:
    web = tmp_path / "tokens" / "web"
    write_index(web, read_index(web).model_copy(update={"tokenizer": "1" * 64}))
    with structlog.testing.capture_logs() as said:
        train(config(0))
    assert metrics(config(0))[-1]["bits_per_byte"] is None
    assert not [line for line in said if line["event"] == "sample"]


@pytest.fixture
def foreign(job: Any, tmp_path: Path) -> Any:
    """Return the job with files that name no tokenizer and have more distinct tokens than there are bytes."""
    for name in SIZES:
        (tmp_path / "raw" / name).mkdir(parents=True)
        (tokens_of(name) * 3).astype("<u2").tofile(tmp_path / "raw" / name / "tokens.bin")
    files = {name: {"name": name, "format": "Raw", "dtype": "uint16"} for name in SIZES}
    job["spec"]["data"] |= {"path": str(tmp_path / "raw"), "sources": [files["web"], files["code"]]}
    job["spec"]["data"]["validation"]["sets"] = [files["wiki"]]
    job["spec"]["model"]["vocabularySize"] = 768
    return job


@pytest.mark.usefixtures("foreign")
def test_files_of_an_unknown_tokenizer_are_trained_on_without_bits_per_byte(config: Any, train: Any) -> None:
    train(config(0))
    assert metrics(config(0))[-1]["validation_losses"].keys() == {"wiki"}
    assert metrics(config(0))[-1]["bits_per_byte"] is None


@pytest.mark.usefixtures("foreign")
def test_prompts_need_the_tokenizer(job: Any, config: Any, train: Any) -> None:
    job["spec"]["data"]["validation"]["samples"] = {"prompts": ["And"]}
    with pytest.raises(InvalidJobError, match=r"samples has prompts, and the tokenizer of the token files is not kno"):
        train(config(0))


def test_a_tokenizer_that_cannot_have_made_them_is_refused(
    foreign: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path / "raw" / "tokenizer")
    foreign["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    with pytest.raises(InvalidJobError, match=r"validation set has the token \d{3}, and spec.data.tokenizer has"):
        train(config(0))


def test_a_model_without_rows_for_all_tokens_is_refused(foreign: Any, config: Any, train: Any, tmp_path: Path) -> None:
    """The model is rejected even if the files contain none of the tokens that have no row."""
    for name in SIZES:
        (tokens_of(name) % 100).astype("<u2").tofile(tmp_path / "raw" / name / "tokens.bin")
    write_tokenizer(tmp_path / "raw" / "tokenizer")
    foreign["spec"]["data"]["tokenizer"] = {"type": "File", "path": "tokenizer"}
    foreign["spec"]["model"]["vocabularySize"] = 200
    with pytest.raises(InvalidJobError, match=r"vocabularySize 200 must be at least 256"):
        train(config(0))


def test_a_job_goes_on_from_anothers_checkpoint_with_another_mixture_and_batch(
    job: Any, config: Any, train: Any
) -> None:
    """The job starts in the middle of the other job's phase, and is itself stopped in the middle of the phase."""
    assert train(config(0, "tiny-11111111"), iter([False, False, True]).__next__).step == 3
    job["spec"]["checkpoint"]["continueFrom"] = "tiny-11111111"
    job["metadata"]["uid"] = "22222222-3333"
    job["spec"]["data"]["sources"] = [{"name": "code"}, {"name": "wiki"}]
    job["spec"]["phases"][0]["batch"]["sequences"] = 4
    phase = config(0, "tiny-22222222")
    assert train(phase, lambda: True).step == 4
    assert train(phase).step == 6
    store = CheckpointStore(Path(phase.work_directory), "22222222-3333")
    # The other job read 18 samples: 3 periods of web and code, and 3 more. Then 12 samples of its own, half from each
    # source.
    consumed = [manifest.consumed for manifest in store.committed()]
    assert consumed[-1] == {"web": 11, "code": 7 + 6, "wiki": 6}
