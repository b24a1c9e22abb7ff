"""The benchmark of text, token files, vocabularies and a trained model: its plan, its rejections, its section, and its
programs at tiny sizes."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_trainer.data.stream import shuffled
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.data.tokens.megatron import megatron_files, read_index, verify
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.training.phase import train_phase

from benchmarks.agreement import LossesDiffer
from benchmarks.data import job, losses, read, reading, resident, training
from benchmarks.data.report import bars, section
from benchmarks.data.results import (
    ALONE,
    DATATROVE,
    MEGATRON,
    ORDERED,
    OURS,
    PLAIN,
    WHOLE,
    Results,
)
from benchmarks.data.results import read as read_results
from benchmarks.data.results import write as write_results
from benchmarks.data.same import largest_difference
from benchmarks.machine import Stamp
from tests.unit.benchmarks.fake_results import ALL, MACHINE, RESIDENT, cell

SIZE = reading.Size(1 << 20, 257, {"warm": 128, "cold": 64}, 2, (OURS, MEGATRON))
STAMP = Stamp(date="2026-02-03", commit="def")


def test_the_tables_show_medians_quartiles_and_how_many_times_as_fast_ours_is() -> None:
    text = section(ALL)
    words = " ".join(text.split())
    assert f"| {ALONE} | 2.50 [2.50–2.50] (0.80×) |\n| {OURS} | 2.00 [2.00–2.00] |" in text
    assert f"| {MEGATRON} | 8,000 [8,000–8,000] (2.50×) | not quiet (67%) |" in text
    assert f"| {DATATROVE} | 40,000 [40,000–40,000] (0.50×) | 250 [250–250] (4.00×) |" in text
    assert f"| 32,768 tokens, {WHOLE} | 400 [400–400] (0.80×) | 1,600 |" in text
    assert f"| {OURS} | 500 [500–500] | 4,096 [4,096–4,096] |" in text
    assert f"| {PLAIN} | 600 [600–600] (1.20×) | 3,413 [3,413–3,413] |" in text
    assert "waited for data for 0.200% of the steps' time, at most 0.300% in a turn" in words
    assert "grows by 110.0 MiB at the peak, from 300 MiB that the imports take to 410 MiB" in words
    assert max(len(line) for line in text.splitlines()) <= 120


def test_a_bar_says_whether_it_is_reached_and_of_what_was_not_quiet_nothing() -> None:
    assert [bar.verdict for bar in bars(ALL)] == [
        "**not reached**: 80.0%",
        "reached: 2.50×",
        "not measured on a quiet machine",
        "**not reached**: 1.50×",
        "reached: 3.00×",
        "**not reached**: 110.0 MiB",
        "reached: 0.30%",
    ]
    assert {bar.verdict for bar in bars(Results(machine=MACHINE))} == {"not measured"}


def test_a_part_that_is_measured_anew_replaces_its_own_and_no_other(tmp_path: Path) -> None:
    found = ALL.with_part("resident", RESIDENT.model_copy(update={"grown_bytes": 5 << 20}), STAMP, MACHINE)
    write_results(found, tmp_path / "data.json")
    text = section(read_results(tmp_path / "data.json"))
    assert "grows by 5.0 MiB" in " ".join(text.split())
    assert text.count("Measured on 2026-01-02, at abc+.") == text.count("Measured on 2026-02-03, at def.") == 1
    assert text.count("an unknown day") == 3
    assert read_results(tmp_path / "none.json") is None


def test_readers_of_a_round_read_the_same_windows_and_no_other_round_does() -> None:
    planned = reading.turns(SIZE)
    assert [(turn.temperature, turn.round, turn.reader, turn.first, turn.count) for turn in planned] == [
        ("warm", 0, OURS, 0, 128),
        ("warm", 0, MEGATRON, 0, 128),
        ("warm", 1, OURS, 128, 128),
        ("warm", 1, MEGATRON, 128, 128),
        ("cold", 0, OURS, 256, 64),
        ("cold", 0, MEGATRON, 256, 64),
        ("cold", 1, OURS, 320, 64),
        ("cold", 1, MEGATRON, 320, 64),
    ]
    assert reading.turns(reading.FULL)[-1].first + reading.FULL.windows["cold"] <= reading.FULL.file_windows


def test_no_table_is_made_of_readers_that_read_other_tokens() -> None:
    def timed(reader: str, digest: int) -> tuple[reading.Turn, reading.Timed]:
        turn = reading.Turn(reader=reader, temperature="warm", round=0, first=0, count=1)
        return turn, reading.Timed(seconds=2.0, digest=digest, in_memory=1.0)

    reading.check_same_tokens([timed(OURS, 5), timed(MEGATRON, 5)])
    with pytest.raises(LossesDiffer, match="Megatron has read other tokens"):
        reading.check_same_tokens([timed(OURS, 5), timed(MEGATRON, 6)])
    assert reading.cells([timed(OURS, 5), timed(MEGATRON, 5), timed(OURS, 5)]) == [
        cell(OURS, "warm", 2.0, 2.0),
        cell(MEGATRON, "warm", 2.0),
    ]


def test_a_file_that_is_not_as_warm_as_said_is_refused() -> None:
    warm, cold = (
        reading.Turn(reader=OURS, temperature=temperature, round=0, first=0, count=1)
        for temperature in ("warm", "cold")
    )
    reading.check_temperature(warm, 1.0)
    reading.check_temperature(cold, 0.0)
    with pytest.raises(DevError, match="only 50% of the file"):
        reading.check_temperature(warm, 0.5)
    with pytest.raises(DevError, match="50% of the file stay"):
        reading.check_temperature(cold, 0.5)


@pytest.mark.parametrize("wrong", [[1.0, 2.0002], [1.0, float("nan")], [1.0], []])
def test_stacks_with_other_values_are_not_compared(wrong: list[float]) -> None:
    assert largest_difference("theirs", [1.0, 2.00002], OURS, [1.0, 2.0]) == pytest.approx(1e-5)
    with pytest.raises(LossesDiffer, match="theirs has"):
        largest_difference("theirs", wrong, OURS, [1.0, 2.0])


def test_no_table_is_made_of_losses_that_differ_in_a_gradient() -> None:
    size = losses.Size(4, 2, (97,), 1, 2)
    values = {OURS: [5.0, 1.0], WHOLE: [5.0, 1.001]}
    turns = [
        (case, losses.Passes(seconds=[9.0, 1.0, 2.0], peak_bytes=7, values=values[case.stack]))
        for case in losses.cases(size)
    ]
    with pytest.raises(LossesDiffer, match="the loss of 97 tokens by whole logits"):
        losses.summed_up(size, turns)
    sound = [(case, passes.model_copy(update={"values": values[OURS]})) for case, passes in turns]
    assert losses.summed_up(size, sound).cells == [cell(stack, "97", 1.0, 2.0, peak=7) for stack in (OURS, WHOLE)]


def test_no_table_is_made_of_a_model_that_trains_otherwise(tmp_path: Path) -> None:
    config = job.config_of(job.TINY, tmp_path, tmp_path, steps=3)
    ours = training.Steps(seconds=[9.0, 1.0, 2.0], losses=[3.0, 2.0, 1.0], waited=[0.3, 0.0, 0.3])
    plain = training.Steps(seconds=[9.0, 3.0, 4.0], losses=[3.0, 2.0, 1.00001])
    found = training.summed_up(config, 1, [ours, ours], [plain])
    assert found.cells == [cell(OURS, training.CASE, 1.0, 2.0, 1.0, 2.0), cell(PLAIN, training.CASE, 3.0, 4.0)]
    assert found.waited == pytest.approx([0.05, 0.05])
    assert found.apart == pytest.approx(1e-5, rel=1e-3)
    other = plain.model_copy(update={"losses": [3.0, 2.1, 1.0]})
    with pytest.raises(LossesDiffer, match="pseudoreal has the value 2"):
        training.summed_up(config, 1, [ours], [other])
    with pytest.raises(LossesDiffer, match="transformers has the value 2"):
        training.summed_up(config, 1, [ours], [plain, other])


def test_seconds_of_steps_are_the_differences_of_what_metrics_count() -> None:
    lines = [{"seconds": 2.0, "loss": 3.0, "data_seconds": 0.5}, {"seconds": 2.5, "loss": 2.0, "data_seconds": 0.0}]
    found = training.steps_of("\n".join(json.dumps(line) for line in lines))
    assert (found.seconds, found.losses, found.waited) == ([2.0, 0.5], [3.0, 2.0], [0.5, 0.0])


def test_the_model_is_a_llama_of_at_least_five_million_parameters(tmp_path: Path) -> None:
    config = job.config_of(job.FULL, tmp_path, tmp_path, steps=1)
    step = training.Steps(seconds=[1.0, 1.0], losses=[3.0, 2.0], waited=[0.0, 0.0])
    assert training.summed_up(config, 0, [step], [step]).parameters > 5_000_000
    assert job.in_words(config.model).startswith("Llama3: 6 layers, hidden 256, 4 heads, 2 of keys and values")


def test_the_files_of_the_readers_are_sound(tmp_path: Path) -> None:
    """Our own reader of Megatron's files verifies every entry."""
    tokens = 2 * reading.LONG_DOCUMENT_TOKENS + 5
    file = tmp_path / "tokens.bin"
    reading.write_file(file, tokens)
    long, usual = (read_index(tmp_path / name) for name in ("long.idx", "tokens.idx"))
    for index in (long, usual):
        verify(index)
    assert (long.documents, long.lengths.part(0, 3).tolist()) == (3, [1 << 20, 1 << 20, 5])
    assert tokens / usual.documents == pytest.approx(reading.DOCUMENT_TOKENS, rel=0.1)
    assert megatron_files([file, tmp_path / "long.bin"]).tokens == 2 * tokens
    assert all(link.samefile(file) for link in (tmp_path / "tokens.ds", tmp_path / "long.bin"))


@pytest.mark.parametrize(
    ("begin", "expected"),
    [
        (0, [(0, 0, 4)]),
        (8, [(0, 8, 2), (1, 0, 2)]),
        (9, [(0, 9, 1), (1, 0, 2), (2, 0, 1)]),
        (10, [(1, 0, 2), (2, 0, 2)]),
    ],
)
def test_a_window_is_found_in_its_documents(begin: int, expected: list[tuple[int, int, int]]) -> None:
    assert read.document_parts(np.array([10, 12, 20]), begin, 4) == expected


@pytest.mark.parametrize("reader", [OURS, ORDERED])
@pytest.mark.parametrize("temperature", ["warm", "cold"])
def test_ours_reads_the_windows_that_all_are_given(tmp_path: Path, temperature: str, reader: str) -> None:
    file, width = tmp_path / "tokens.bin", 257
    reading.write_file(file, 1 << 20)
    tokens = np.fromfile(file, "<u2")
    places, expected = shuffled(np.arange(40, 140), 4080, read.SEED), 0
    np.save(tmp_path / "numbers.npy", places)
    for batch in (places[:64], places[64:]):
        expected = (31 * expected + read.digest_of(tokens[batch[:, None] * width + np.arange(width)])) % 2**63
    turn = {
        "file": str(file),
        "reader": reader,
        "width": width,
        "first": 40,
        "windows": 4080,
        "temperature": temperature,
    }
    found = read.timed(turn | {"numbers": str(tmp_path / "numbers.npy")})
    assert found["digest"] == expected
    assert found["seconds"] > 0


def test_a_digest_knows_each_token_by_its_place() -> None:
    one = np.array([[1, 2], [3, 4]])
    assert read.digest_of(one) == 1 + 4 + 9 + 16
    assert len({read.digest_of(other) for other in (one, one[::-1], one[:, ::-1], one + 1)}) == 4


def test_memory_is_that_of_a_corpus_of_files_without_content(tmp_path: Path) -> None:
    shards = resident.shares(5, resident.WEIGHTS)
    assert shards == {"web": 3, "code": 2}
    for name, count in shards.items():
        resident.make_source(tmp_path / name, count, 1 << 20)
    assert sum(os.stat(file).st_blocks for file in tmp_path.glob("*/*.bin")) == 0
    found = resident.grown(resident.Corpus(folder=str(tmp_path), steps=2))
    assert found.samples == ((3 << 19) - 1) // resident.SEQUENCE + ((2 << 19) - 1) // resident.SEQUENCE
    assert found.before_bytes > 0


def test_both_losses_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    loss = importlib.import_module("benchmarks.data.loss")
    monkeypatch.setattr(loss, "most_tokens", lambda *_: 10)
    size = losses.Size(33, 8, (97,), 1, 1)
    found = losses.summed_up(size, [(case, loss.passes(case)) for case in losses.cases(size)])
    assert [len(each.seconds) for each in found.cells] == [1, 1]


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    job.write_tokens(tmp_path / "tokens", job.TINY)
    return tmp_path / "tokens"


def test_both_trainers_have_the_same_losses(tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(config: Any) -> None:
        train_phase(config, open_corpus(config), Ranks(0, 1, torch.device("cpu")), lambda: False)

    plain = importlib.import_module("benchmarks.data.plain")
    monkeypatch.setattr(training, "run_rank", trained)
    size = job.TINY
    training.export_first_weights(size, tokens, tmp_path / "first", tmp_path / "export")
    config = job.config_of(size, tokens, tmp_path / "work", steps=size.steps)
    np.save(tmp_path / "batches.npy", job.batches(config, size.steps))
    work = training.Work(
        model=str(tmp_path / "export"), batches=str(tmp_path / "batches.npy"), optimizer=config.optimizer
    )
    losses = [*plain.train(work)]
    trained(config)
    ours = training.steps_of((tmp_path / "work/metrics.jsonl").read_text())
    assert ours.losses == pytest.approx(losses, rel=1e-6)
    assert losses[0] != pytest.approx(losses[-1], rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("part", ["preparing", "resident", "losses", "training"])
def test_a_part_runs_in_processes_of_its_own(part: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"benchmarks.data.{part}")
    assert "\n### " in section(Results(machine=MACHINE).with_part(part, module.measure(tmp_path, True), STAMP, MACHINE))
