"""Jobs with `documents.masking: IntraDocument`: losses, validation, two ranks, restarts, rejections."""

import hashlib
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.data.documents import Counts
from pseudoreal_trainer.data.token_corpus import end_of_document_of, open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.training.metrics import phase_gauges
from pseudoreal_trainer.training.schedule import learning_rate
from torch import Tensor
from torch.nn import functional as F

from tests.support.adamw import adamw
from tests.support.checkpoints import assert_same, metrics, newest_of
from tests.support.forked import start_rank
from tests.support.ports import free_port
from tests.support.processes import succeed
from tests.unit.trainer.data.support.cut import Pair, cut
from tests.unit.trainer.data.support.slow_permutation import permuted
from tests.unit.trainer.data.support.written import write_native

T, END = 16, 0
"""`model.sequenceLength` of `job_body`, and the token id that ends a document."""
ONE_RANK = Ranks(0, 1, torch.device("cpu"))


def documents_of(name: str) -> list[list[int]]:
    """Return 40 documents of 0 to 30 tokens; some are longer than a sequence."""
    random = np.random.default_rng(int.from_bytes(name.encode(), "little") % 2**32)
    return [random.integers(1, 256, length).tolist() for length in random.integers(0, 31, 40)]


def tokens_of(name: str) -> list[int]:
    return [token for document in documents_of(name) for token in (*document, END)]


@pytest.fixture(autouse=True)
def job(job_body: Any, tmp_path: Path) -> Any:
    for name in ("web", "wiki"):
        write_native(tmp_path / "tokens" / name, documents_of(name))
    job_body["spec"]["data"] = {
        "path": str(tmp_path / "tokens"),
        "sources": [{"name": "web"}],
        "documents": {"masking": "IntraDocument"},
        "validation": {"everySteps": 4, "sequences": 5, "sets": [{"name": "wiki"}]},
    }
    return job_body


def sample(number: int) -> list[int]:
    """Return sample `number` of the source, computed with Python integers."""
    tokens = tokens_of("web")
    samples = (len(tokens) - 1) // T
    key = int.from_bytes(hashlib.sha256(b"web").digest()[:8], "little")
    first = T * permuted(number % samples, samples, 0, number // samples, key)
    return tokens[first : first + T + 1]


def parts_of(rows: list[list[int]]) -> list[list[Pair]]:
    return [part for row in rows for part in cut(row, END)]


def loss_of(model: Transformer, parts: list[list[Pair]]) -> Tensor:
    """Return the mean loss over all targets, with one forward pass per document."""
    sums, count = [], 0
    for part in parts:
        pairs = [(token, target) for token, target in part if target is not None]
        if pairs:
            inputs, targets = zip(*pairs, strict=True)
            sums.append(F.cross_entropy(model(torch.tensor([inputs]))[0], torch.tensor(targets), reduction="sum"))
            count += len(pairs)
    return torch.stack(sums).sum() / count


def reference(config: PhaseConfig) -> tuple[list[float], float]:
    """Train in a plain PyTorch loop; return the losses of six steps of six samples, and the final validation loss."""
    model = build_model(config.model, config.sharing, config.data.seed, torch.float64)
    optimizer = adamw(model.parameters(), config.optimizer, 0.0)
    losses = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config.optimizer, step + 1, config.total_steps)
        optimizer.zero_grad()
        loss = loss_of(model, parts_of([sample(number) for number in range(6 * step, 6 * step + 6)]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, loss_of(model, parts_of(validation_windows())).item()


def validation_windows() -> list[list[int]]:
    tokens = tokens_of("wiki")
    available = (len(tokens) - 1) // T
    return [tokens[T * (i * available // 5) :][: T + 1] for i in range(5)]


def test_losses_are_those_of_documents_in_rows_of_their_own(config: Any, train: Any) -> None:
    message = train(config(0))
    losses, validated = reference(config(0))
    lines = metrics(config(0))
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-13)
    assert message.validation_loss == pytest.approx(validated, rel=1e-13)
    assert {line["tokens"] for line in lines} == {96 * step for step in range(1, 7)}, (
        "all tokens that were read count, with and without a target"
    )
    targets = [target for part in parts_of(validation_windows()) for _, target in part if target is not None]
    bits = validated * len(targets) / math.log(2) / sum(target != END for target in targets)
    assert lines[-1]["bits_per_byte"]["wiki"] == pytest.approx(bits, rel=1e-13)


def test_an_auxiliary_loss_is_the_mean_over_sequences(job: Any, config: Any, train: Any) -> None:
    """Every token goes to all experts, so the load is balanced and each of the four layers' auxiliary loss equals its
    factor, however few tokens have a target."""
    top_k = {"perToken": 3, "auxiliaryLoss": "0.5"}
    job["spec"]["model"]["experts"] = {"type": "TopK", "count": 3, "topK": top_k}
    train(config(0))
    assert [line["auxiliary_loss"] for line in metrics(config(0))] == pytest.approx([2.0] * 6, rel=1e-12)


def test_operations_are_those_within_documents(config: Any, train: Any) -> None:
    train(config(0))
    parts = parts_of([sample(number) for number in range(30, 36)])
    counted = Counts(1, {None: sum(len(part) ** 2 for part in parts)})
    line, gauges = metrics(config(0))[-1], phase_gauges(config(0), ONE_RANK)
    assert gauges.operations(counted) < gauges.operations()
    rate = gauges.operations(counted) * line["tokens_per_second"] / 96 / 1e12
    assert line["teraflops_per_second"] == pytest.approx(rate, rel=1e-12)


def test_a_restart_after_every_step_changes_no_bit(config: Any, train: Any) -> None:
    whole, parts = config(0, "whole"), config(0, "parts")
    train(whole)
    for step in range(1, 6):
        asked = iter([True, True])
        assert train(parts, lambda asked=asked: next(asked)).step == step
    train(parts)
    assert_same(newest_of(whole), newest_of(parts))


LAYOUTS = {
    "data": {"workers": 2, "parallelism": {"stateSharding": "Full"}},
    "pipeline": {"workers": 2, "parallelism": {"pipeline": 2, "schedule": "1F1B"}, "offload": {"home": "Disk"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_what_one_rank_trains(layout: str, job: Any, config: Any, train: Any, tmp_path: Path) -> None:
    """Micro-batches of three sequences, which two data ranks share unevenly; two blocks shared by four layers."""
    phase = job["spec"]["phases"][0]
    phase["sharing"] = {"blocks": 2}
    one = config(0, "one")
    train(one)
    phase |= LAYOUTS[layout]
    two = config(0, "two")
    file, port = tmp_path / "config.json", free_port()
    file.write_text(two.to_json())
    succeed(start_rank(file, rank, 2, port, tmp_path / str(rank)) for rank in range(2))
    for name, array in newest_of(one).whole().items():
        np.testing.assert_allclose(newest_of(two).tensor(name), array, rtol=0, atol=1e-12)
    both = (one, two)
    losses = [[line["loss"] for line in metrics(each)] for each in both]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    per_token = [[line["teraflops_per_second"] / line["tokens_per_second"] for line in metrics(each)] for each in both]
    assert per_token[0] == pytest.approx([2 * each for each in per_token[1]], rel=1e-9), "counted over all ranks"
    starts = [newest_of(each).manifest.start_validation_loss for each in both]
    assert starts[0] == starts[1], "equal to the bit"


@pytest.fixture
def raw(job: Any, tmp_path: Path) -> Any:
    """Return the job with raw token files, which do not name the end-of-document token."""
    for name in ("web", "wiki"):
        (tmp_path / "raw" / name).mkdir(parents=True)
        np.array(tokens_of(name), "<u2").tofile(tmp_path / "raw" / name / "tokens.bin")
    files = {name: {"name": name, "format": "Raw"} for name in ("web", "wiki")}
    job["spec"]["data"] |= {"path": str(tmp_path / "raw"), "sources": [files["web"]]}
    job["spec"]["data"]["validation"]["sets"] = [files["wiki"]]
    return job


def test_the_job_may_say_how_documents_end(raw: Any, config: Any, train: Any) -> None:
    raw["spec"]["data"]["documents"]["endToken"] = END
    train(config(0))
    losses, _ = reference(config(0))
    assert [line["loss"] for line in metrics(config(0))] == pytest.approx(losses, rel=1e-13)


@pytest.mark.usefixtures("raw")
def test_where_nobody_says_how_documents_end_the_job_is_refused(config: Any) -> None:
    with pytest.raises(InvalidJobError, match=r"the files of web do not say which token ends documents, .*endToken"):
        open_corpus(config(0))


def test_two_ends_are_refused(job: Any, config: Any) -> None:
    job["spec"]["data"]["documents"]["endToken"] = 7
    with pytest.raises(InvalidJobError, match=r"end with the token 0 by web, and with 7 by spec.data.documents.endTok"):
        open_corpus(config(0))


def test_an_end_that_is_nowhere_is_refused(raw: Any, config: Any, tmp_path: Path) -> None:
    raw["spec"]["data"]["documents"]["endToken"] = 9
    for name in ("web", "wiki"):
        np.array([token + 10 for token in tokens_of(name)], "<u2").tofile(tmp_path / "raw" / name / "tokens.bin")
    raw["spec"]["model"]["vocabularySize"] = 300
    with pytest.raises(InvalidJobError, match="the token 9, which should end documents, is at none"):
        open_corpus(config(0))


@pytest.mark.parametrize("name", ["web", "wiki"])
def test_rows_of_another_length_are_refused(name: str, job: Any, config: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tokens" / name
    folder.rename(tmp_path / "before")
    write_native(folder, documents_of(name), sequence=32)
    with pytest.raises(
        InvalidJobError, match=rf"source {name} are packed into rows of 32 tokens, and model.sequenceLen"
    ):
        open_corpus(config(0))
    job["spec"]["model"]["sequenceLength"] = 32
    assert end_of_document_of(open_corpus(config(0))) == END


@pytest.mark.parametrize(
    ("packed", "masking", "told"),
    [
        (["web", "wiki"], "None", ["web", "wiki"]),
        (["wiki"], "None", ["wiki"]),
        (["web", "wiki"], "IntraDocument", None),
        ([], "None", None),
    ],
)
def test_packed_files_without_masks_are_told(
    packed: list[str], masking: str, told: list[str] | None, job: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    """The warning is logged once, at the first start. The job trains all the same, and its restart does not
    warn again."""
    for name in packed:
        shutil.rmtree(tmp_path / "tokens" / name)
        write_native(tmp_path / "tokens" / name, documents_of(name), sequence=T)
    job["spec"]["data"]["documents"] = {"masking": masking}
    begun = iter(range(100))
    with structlog.testing.capture_logs() as said:
        train(config(0), stop=lambda: next(begun) >= 2)
        train(config(0))
    warnings = [line for line in said if line["event"] == "packed_without_masks"]
    assert [(line["log_level"], line["files"]) for line in warnings] == ([] if told is None else [("warning", told)])


@pytest.mark.parametrize(
    ("masking", "told"),
    [
        ("None", None),
        (
            "IntraDocument",
            "one call per document: torch has attention with variable lengths for CUDA devices, not for cpu",
        ),
    ],
)
def test_start_of_a_phase_says_how_attention_within_documents_is_computed(
    masking: str, told: str | None, job: Any, config: Any, train: Any
) -> None:
    job["spec"]["data"]["documents"] = {"masking": masking}
    with structlog.testing.capture_logs() as said:
        train(config(0), stop=lambda: True)
    assert [line["document_attention"] for line in said if line["event"] == "phase_started"] == [told]
