"""Delinking writes only a manifest, with the expected weights, moments and counts."""

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.layers import experts_of_layers
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.delink import Target, delink, delinked
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.data.stream import Stream
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.units import KINDS, are_experts, block_of
from pseudoreal_trainer.training.start import load_weights
from torch.nn import functional as F

from tests.support.checkpoints import newest

TOKENS = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
UID = "11111111-2222"


def _model(checkpoint: Reader) -> Transformer:
    model = Transformer(checkpoint.manifest.model, checkpoint.manifest.sharing).double()
    load_weights(model, checkpoint)
    return model


def _loss(model: Transformer) -> torch.Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


REFINEMENTS = [
    ({"blocks": 1}, None),
    ({"blocks": 1}, {"blocks": 2, "pattern": "Segment"}),
    ({"blocks": 2, "pattern": "Cycle"}, {"blocks": 4, "pattern": "Cycle"}),
    ({"blocks": 2, "pattern": "Segment"}, {"blocks": 4, "pattern": "Segment"}),
    ({"blocks": 2, "pattern": "Segment"}, None),
    ({"blocks": 2, "pattern": "Cycle"}, {"blocks": 2, "pattern": "Cycle"}),
]


MIXTURE = {"count": 6, "prototypes": 3, "capacityFactor": "0.75"}
BALANCED = {
    "type": "TopK",
    "count": 5,
    "topK": {"perToken": 2, "score": "Sigmoid", "biasUpdateRate": "0.02", "auxiliaryLoss": "0.1"},
}
HALVES = {"blocks": 2, "pattern": "Segment"}
ALONE = {"parts": ["Experts"]}
MIXED_REFINEMENTS = [
    *((*REFINEMENTS[index], MIXTURE) for index in (0, 2, 3)),
    (*REFINEMENTS[2], BALANCED),
    (HALVES | ALONE, None, BALANCED),
    ({"blocks": 1} | ALONE, HALVES | ALONE, MIXTURE | {"denseLayers": [0, 2]}),
    ({"blocks": 1}, HALVES | ALONE, MIXTURE),
    (HALVES, HALVES | ALONE, BALANCED),
]


@pytest.mark.processor
@pytest.mark.parametrize(("before", "after", "experts"), [*((*r, None) for r in REFINEMENTS), *MIXED_REFINEMENTS])
def test_the_function_stays_the_same_to_the_bit(
    before: Any, after: Any, experts: Any, job_body: Any, tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    job_body["spec"]["model"]["experts"] = experts
    job_body["spec"]["phases"][0]["sharing"] = before
    job_body["spec"]["phases"][1]["sharing"] = after
    train(config(0))
    message = delink(delink_of(1))
    source, target = (newest(CheckpointStore(tmp_path / "work", UID), phase) for phase in ("pseudo", "real"))
    assert message.checkpoint == target.manifest.name == "real-00000006"
    assert target.manifest.parent == "pseudo-00000006"
    assert target.manifest.sharing.blocks == (after or {"blocks": 4})["blocks"]
    shared, real = _model(source), _model(target)
    assert torch.equal(shared(TOKENS), real(TOKENS))
    _loss(shared).backward()
    _loss(real).backward()
    assert _loss(shared) == _loss(real)
    for name, parameter in shared.blocks.named_parameters():
        block, _, rest = name.partition(".")
        used: tuple[int | None, ...] = shared.layer_blocks
        owned: tuple[int | None, ...] = real.layer_blocks
        if are_experts(f"blocks.{name}"):
            used, owned = (experts_of_layers(m.sharing, m.model) for m in (source.manifest, target.manifest))
        copies = {new for old, new in zip(used, owned, strict=True) if old == int(block) and new is not None}
        if not parameter.requires_grad:
            assert parameter.any(), "a balancing bias"
            assert all(torch.equal(real.blocks[copy].get_parameter(rest), parameter) for copy in copies)
            continue
        total = torch.stack([_gradient(real.blocks[copy].get_parameter(rest)) for copy in copies]).sum(dim=0)
        torch.testing.assert_close(parameter.grad, total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["Copy", "Scale", "Reset"])
def test_delink_of_shared_experts_divides_only_the_moments_of_experts(
    kind: str, job_body: Any, tmp_path: Path, config: Any, train: Any
) -> None:
    """4 layers on one set of experts become 2 sets of 2 layers each, and then each layer has its own experts. The
    second delink starts from a checkpoint that is itself a link."""
    job_body["spec"]["model"]["experts"] = BALANCED
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 1} | ALONE
    train(config(0))
    store = CheckpointStore(tmp_path / "work", UID)
    before = newest(store, "pseudo")
    halves = delinked(before.manifest, "halves", Target(Sharing.model_validate(HALVES | ALONE)), kind)  # type: ignore[arg-type]
    own = delinked(halves, "own", Target(Sharing(blocks=4)), kind)  # type: ignore[arg-type]
    factors = dict(zip(KINDS, {"Copy": (1, 1, 1), "Scale": (1, 1 / 2, 1 / 4), "Reset": (1, 0, 0)}[kind], strict=True))
    for times, manifest, numbers in ((1, halves, (0, 2)), (2, own, (0, 1, 2, 3))):
        after = Reader(manifest, before.checkpoints)
        assert {block_of(name) for name in after.names if are_experts(name)} == {*numbers}
        for number, moment in product(numbers, KINDS):
            old = before.tensor("blocks.0.experts.up.weight", moment)
            assert np.abs(old).max() > 0
            found = after.tensor(f"blocks.{number}.experts.up.weight", moment)
            assert np.array_equal(found, old * factors[moment] ** times)
        for block, moment in product(range(4), KINDS):
            for name in ("router.weight", "attention.query.weight", "experts.balancing_bias"):
                name = f"blocks.{block}.{name}"
                assert np.array_equal(after.tensor(name, moment), before.tensor(name, moment))
        assert after.updates("blocks.2.experts.up.weight") == (0 if kind == "Reset" else 6)
        assert after.updates("blocks.2.router.weight") == after.updates("blocks.3.experts.balancing_bias") == 6


def test_delink_writes_a_manifest_and_nothing_else(tmp_path: Path, config: Any, delink_of: Any, train: Any) -> None:
    train(config(0))
    delink(delink_of(1))
    folder = tmp_path / "work" / "checkpoints" / "real-00000006"
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]


@pytest.mark.parametrize("kind", ["Copy", "Scale", "Reset"])
def test_moments_are_divided_by_the_uses_that_fall_away(
    kind: str, job_body: Any, tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    """4 layers on 1 block become 2 blocks: each new block has half of the uses, so n = 2."""
    job_body["spec"]["phases"][1]["sharing"] = {"blocks": 2}
    job_body["spec"]["delink"] = {"optimizerState": kind}
    train(config(0))
    delink(delink_of(1))
    before, after = (newest(CheckpointStore(tmp_path / "work", UID), phase) for phase in ("pseudo", "real"))
    assert after.manifest.optimizer_state == kind
    factors = dict(zip(KINDS, {"Copy": (1, 1, 1), "Scale": (1, 1 / 2, 1 / 4), "Reset": (1, 0, 0)}[kind], strict=True))
    for block, moment in product((0, 1), KINDS):
        old = before.tensor("blocks.0.ffn.up.weight", moment)
        assert np.abs(old).max() > 0
        assert np.array_equal(after.tensor(f"blocks.{block}.ffn.up.weight", moment), old * factors[moment])
    for name, moment in product(("embedding.weight", "head.weight", "norm.weight"), KINDS):
        assert np.array_equal(after.tensor(name, moment), before.tensor(name, moment))
    assert after.manifest.updates.others == before.manifest.updates.others == 6
    assert after.manifest.updates.blocks == (0 if kind == "Reset" else 6)


def _squares_of_gradients(source: Reader, config: PhaseConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Return, per tensor, squared gradients in the step after a checkpoint, by plain autograd: of the shared block, and
    the mean over copies of it."""
    windows = Stream(load_corpus(config.data, 16).train, 16, config.data.seed).windows(
        source.manifest.global_cursor, source.manifest.global_cursor + config.batch.sequences
    )
    shared = _model(source)
    copies = Transformer(source.manifest.model, Sharing(blocks=4)).double()
    copies.load_state_dict(shared.state_dict(), strict=False)
    for block in copies.blocks:
        block.load_state_dict(shared.blocks[0].state_dict())
    tokens = torch.from_numpy(windows).long()
    for model in (shared, copies):
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()

    def squares(name: str, model: Transformer) -> list[float]:
        return [float(_gradient(block.get_parameter(name)).square().sum()) for block in model.blocks]

    names = [name for name, _ in shared.blocks[0].named_parameters()]
    return {n: squares(n, shared)[0] for n in names}, {n: sum(squares(n, copies)) / 4 for n in names}


def test_measured_moments_are_divided_tensor_by_tensor(
    job_body: dict[str, Any], tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    """The only measured step is the sixth, which starts from the checkpoint of step five."""
    job_body["spec"]["delink"] = {"optimizerState": "Measured", "measuredSteps": 1}
    train(config(0))
    delink(delink_of(1))
    store = CheckpointStore(tmp_path / "work", UID)
    fifth = next(manifest for manifest in store.committed("pseudo") if manifest.step == 5)
    shared, single = _squares_of_gradients(store.reader(fifth), config(0))
    before, after = (newest(CheckpointStore(tmp_path / "work", UID), phase) for phase in ("pseudo", "real"))
    assert after.manifest.optimizer_state == "Measured"
    ratios = {name: shared[name] / single[name] for name in shared}
    assert 1 < min(ratios.values()) < 0.9 * max(ratios.values()), "one factor for all would not do"
    for name, ratio in ratios.items():
        for layer in range(4):
            old, new = (
                reader.tensor(f"blocks.{block}.{name}", "second_moment")
                for reader, block in ((before, 0), (after, layer))
            )
            np.testing.assert_allclose(new, old / ratio, rtol=1e-9)
            first = after.tensor(f"blocks.{layer}.{name}", "first_moment")
            assert np.array_equal(first, before.tensor(f"blocks.0.{name}", "first_moment") / 4)
    for name, moment in product(("embedding.weight", "head.weight", "norm.weight"), KINDS):
        assert np.array_equal(after.tensor(name, moment), before.tensor(name, moment))


def test_an_interrupted_phase_measures_the_same(
    job_body: dict[str, Any], tmp_path: Path, config: Any, train: Any
) -> None:
    job_body["spec"]["delink"] = {"optimizerState": "Measured", "measuredSteps": 4}
    train(config(0))
    calls = iter(range(100))
    train(config(0, "again"), stop=lambda: next(calls) == 3)
    stopped = CheckpointStore(tmp_path / "again", UID).newest("pseudo")
    assert stopped is not None
    assert stopped.manifest.measurement is not None
    assert stopped.manifest.measurement.steps == 2, "stopped after step four, the second that measures"
    train(config(0, "again"))
    whole, again = (CheckpointStore(tmp_path / work, UID).newest("pseudo") for work in ("work", "again"))
    assert whole is not None
    assert again is not None
    assert whole.manifest.measurement == again.manifest.measurement
    assert whole.manifest.measurement is not None
    assert whole.manifest.measurement.steps == 4


def test_delink_with_measured_moments_is_refused_without_a_measurement(
    job_body: dict[str, Any], tmp_path: Path, config: Any, train: Any
) -> None:
    train(config(0))
    unmeasured = newest(CheckpointStore(tmp_path / "work", UID), "pseudo").manifest
    with pytest.raises(TrainingError, match=r"pseudo-00000006 measured nothing.*4 blocks \(Cycle\).*delink with Scale"):
        delinked(unmeasured, "real", Target(Sharing(blocks=4)), "Measured")
    job_body["spec"]["delink"] = {"optimizerState": "Measured"}
    train(config(0, "measured"))
    measured = CheckpointStore(tmp_path / "measured", UID).newest("pseudo")
    assert measured is not None
    with pytest.raises(TrainingError, match=r"measured the gradients of 4 blocks \(Cycle\), and not .* 2 blocks"):
        delinked(measured.manifest, "real", Target(Sharing(blocks=2)), "Measured")


def test_layers_that_differ_end_the_phase(job_body: dict[str, Any], tmp_path: Path, config: Any, train: Any) -> None:
    """Every cosine is below 1, so two checks, at steps two and four, end the phase."""
    rule = {"below": "1.0", "everySteps": 2, "checks": 2}
    job_body["spec"]["phases"][0]["until"] = {"step": 9, "gradientCorrelation": rule}
    message = train(config(0))
    assert (message.outcome, message.step) == ("Succeeded", 4)
    lines = [json.loads(line) for line in (tmp_path / "work" / "metrics.jsonl").read_text().splitlines()]
    checked = {line["step"]: line["gradient_correlations"] for line in lines if line["gradient_correlations"]}
    assert {step: len(found) for step, found in checked.items()} == {2: 3, 4: 3}
    assert all(-1 < correlation < 1 for found in checked.values() for correlation in found)


def test_two_delinks_after_each_other_divide_twice(tmp_path: Path, config: Any, train: Any) -> None:
    """4 layers: 1 block becomes 2, and these become 4, without a training step in between."""
    train(config(0))
    source = newest(CheckpointStore(tmp_path / "work", UID), "pseudo")
    once = delinked(source.manifest, "half", Target(Sharing(blocks=2, pattern="Segment")), "Scale")
    twice = delinked(once, "real", Target(Sharing(blocks=4)), "Scale")
    at_once = delinked(source.manifest, "real", Target(Sharing(blocks=4)), "Scale")
    folder = source.checkpoints
    for name, kind in product(Reader(at_once, folder).names, KINDS):
        assert np.array_equal(Reader(twice, folder).tensor(name, kind), Reader(at_once, folder).tensor(name, kind))


def test_delink_can_be_repeated_and_repairs_its_own_checkpoint(
    tmp_path: Path, config: Any, delink_of: Callable[..., Any], train: Any
) -> None:
    train(config(0))
    first = delink(delink_of(1))
    manifest = tmp_path / "work" / "checkpoints" / "real-00000006" / "manifest.json"
    written = manifest.stat().st_mtime_ns
    assert delink(delink_of(1)) == first
    assert manifest.stat().st_mtime_ns == written, "nothing was written again"
    manifest.write_bytes(b"broken")
    assert delink(delink_of(1)) == first
    newest(CheckpointStore(tmp_path / "work", UID), "real")


def test_delink_is_refused_if_the_newest_end_of_a_prolonged_phase_is_corrupt(
    job_body: dict[str, Any], tmp_path: Path, config: Any, delink_of: Callable[..., Any], train: Any
) -> None:
    """The older end has less training: without a word, the phase after it would start from there."""
    job_body["spec"]["optimizer"]["schedule"] = "Constant"
    train(config(0))
    job_body["spec"]["phases"][0]["until"]["step"] = 8
    train(config(0, execution=2))
    checkpoints = tmp_path / "work" / "checkpoints"
    before = {path.name for path in checkpoints.iterdir()}
    assert {"pseudo-00000006", "pseudo-00000008"} <= before
    file = checkpoints / "pseudo-00000008" / "weights-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    says = (
        rf"^pseudo-00000008, the newest end of phase pseudo in {checkpoints}, is corrupt: {file} has the SHA-256 .*;"
        r" restore it, or delete it to go on from pseudo-00000006, the end before it$"
    )
    into_real = delink_of(1).model_copy(update={"execution": 2})
    with pytest.raises(CorruptCheckpoint, match=says):
        delink(into_real)
    assert {path.name for path in checkpoints.iterdir()} == before, "nothing was committed"
    file.write_bytes(content)
    assert delink(into_real).checkpoint == "real-00000008"


def test_an_unfinished_phase_is_not_delinked(config: Any, delink_of: Any, train: Any) -> None:
    train(config(0), stop=lambda: True)
    with pytest.raises(TrainingError, match="phase pseudo has no complete checkpoint"):
        delink(delink_of(1))


def test_a_phase_without_its_delink_says_so(config: Any, train: Any) -> None:
    train(config(0))
    with pytest.raises(TrainingError, match="the delink from the phase before has not run"):
        train(config(1))


_HUGE = """
import resource, sys
from pathlib import Path
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.delink import Target, delinked
from pseudoreal_trainer.checkpoint.manifest import Manifest
from pseudoreal_trainer.checkpoint.reader import Reader
folder = Path(sys.argv[1])
source = Manifest.model_validate_json((folder / "source.json").read_bytes())
target = delinked(source, "real", Target(Sharing(blocks=48)), "Scale")
(folder / "target.json").write_text(target.to_json(indent=1))
found = Manifest.model_validate_json((folder / "target.json").read_bytes())
used = resource.getrusage(resource.RUSAGE_SELF)
# Not ru_maxrss, which counts what the process that started this one had in memory then.
peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(sum(1 for name in Reader(found, folder).names), int(peak) * 1024, round(used.ru_utime + used.ru_stime))
"""


def test_ten_trillion_parameters_are_delinked_in_a_minute(tmp_path: Path, config: Any, train: Any) -> None:
    """48 layers that shared a block of 10240 experts, in a manifest without files."""
    from pseudoreal_trainer.checkpoint.manifest import Piece, StoredTensor

    train(config(0), stop=lambda: True)
    small = newest(CheckpointStore(tmp_path / "work", UID), "pseudo").manifest
    shape = (10240, 20345, 1000)
    whole = StoredTensor(shape=shape, dtype="float32", pieces=[Piece(file=0, begin=0, end=prod(shape))])
    model = small.model.model_copy(update={"layers": 48})
    changes = {"model": model, "tensors": {"blocks.0.experts.up.weight": whole}, "sharing": Sharing(blocks=1)}
    source = small.model_copy(update=changes)
    (tmp_path / "source.json").write_text(source.to_json())
    ended = subprocess.run([sys.executable, "-c", _HUGE, str(tmp_path)], capture_output=True, text=True, check=True)
    tensors_of_all_layers, peak, seconds = map(int, ended.stdout.split())
    assert tensors_of_all_layers == 48
    assert tensors_of_all_layers * prod(shape) > 10e12 * 0.99
    assert seconds < 10
    assert peak < 1 << 30
