"""A growth writes only a manifest. Its first step is that of a plain model with the weights of the layers before."""

import json
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.phase import OptimizerState, Sharing
from pseudoreal_trainer.checkpoint.delink import Target, delink, delinked
from pseudoreal_trainer.checkpoint.materialize import materialize
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, store_of
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.data.stream import Stream
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.units import KINDS, are_experts
from pseudoreal_trainer.training.phase import train_phase
from torch.nn import functional as F

from tests.support.checkpoints import newest
from tests.support.forked import run_ranks

UID = "11111111-2222"
STEPS = 3
"""Steps of the shallow phase."""
MIXTURE = {"type": "TopK", "count": 4, "topK": {"perToken": 2}}
ALONE = {"parts": ["Experts"]}
LAYOUTS: dict[str, Any] = {
    "one rank": {},
    "shards": {"workers": 2},
    "pipeline": {"workers": 2, "parallelism": {"pipeline": 2, "schedule": "1F1B"}},
    "disk": {"offload": {"home": "Disk"}},
    "expert ranks": {"workers": 2, "parallelism": {"expertRanks": 2}},
}
GROWTHS: dict[str, Any] = {
    "own layers": ((2, None), (5, "Stack", None), None),
    "own layers side by side": ((2, None), (5, "Interleave", None), None),
    "shared before and after": ((2, {"blocks": 1}), (6, "Stack", {"blocks": 1}), None),
    "cycle of shared blocks": ((4, {"blocks": 2}), (8, "Stack", {"blocks": 4}), None),
    "segments of shared blocks": (
        (4, {"blocks": 2, "pattern": "Segment"}),
        (6, "Interleave", {"blocks": 2, "pattern": "Segment"}),
        None,
    ),
    "growth and delink at once": ((2, {"blocks": 1}), (4, "Stack", None), None),
    "experts": ((2, None), (4, "Stack", None), MIXTURE),
    "experts alone shared": ((2, {"blocks": 1} | ALONE), (6, "Interleave", {"blocks": 2} | ALONE), MIXTURE),
    "dense layers": ((2, None), (4, "Stack", None), MIXTURE | {"denseLayers": [0, 2]}),
}
"""Layers and sharing before; layers, pattern and sharing after; experts."""


def _grow(body: dict[str, Any], growth: str, before: str = "one rank", after: str = "one rank") -> None:
    """Make the job one of a shallow and a deep phase, in these layouts."""
    (few, had), (many, pattern, gets), experts = GROWTHS[growth]
    spec, batch = body["spec"], {"sequences": 6, "microBatches": 2}
    spec["model"] |= {"layers": many, "experts": experts}
    spec["optimizer"]["clipping"] = {"mode": "None"}
    spec["data"]["validation"]["everySteps"] = STEPS
    spec["phases"] = [
        {"name": "shallow", "layers": few, "sharing": had, "until": {"step": STEPS}} | LAYOUTS[before],
        {"name": "deep", "growth": {"pattern": pattern}, "sharing": gets, "until": {"step": STEPS + 1}}
        | LAYOUTS[after],
    ]
    for phase in spec["phases"]:
        phase["batch"] = batch


def _source(growth: str, layer: int) -> int:
    few, many, pattern = int(GROWTHS[growth][0][0]), int(GROWTHS[growth][1][0]), GROWTHS[growth][1][1]
    stretched = [source for source in range(few) for _ in range(many)]
    return layer % few if pattern == "Stack" else stretched[layer * few]


def _group(sharing: dict[str, Any] | None, layers: int, layer: int) -> int:
    """Return the block, or the set of experts, of a layer."""
    if sharing is None:
        return layer
    blocks = int(sharing["blocks"])
    return layer % blocks if sharing.get("pattern", "Cycle") == "Cycle" else layer // (layers // blocks)


def _own_layers(growth: str, checkpoint: Reader, *, grown: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights of the checkpoint by layers, as if each of the deep model's had its own."""
    (few, had), (many, _, gets), _ = GROWTHS[growth]
    sharing, layers = (gets, many) if grown else (had, few)
    alone = sharing is not None and "parts" in sharing
    found = {name: checkpoint.tensor(name) for name in checkpoint.names if not name.startswith("blocks.")}
    for layer in range(many):
        of = layer if grown else _source(growth, layer)
        group = _group(sharing, layers, of)
        first = next(other for other in range(layers) if _group(sharing, layers, other) == group)
        block, set_ = (of, first) if alone else (group, group)
        for name in checkpoint.names:
            head, number, rest = (*name.split(".", 2), "", "")[:3]
            if head == "blocks" and int(number) == (set_ if are_experts(name) else block):
                found[f"blocks.{layer}.{rest}"] = checkpoint.tensor(name)
    return found


def _plain(checkpoint: Reader, weights: dict[str, np.ndarray[Any, Any]], layers: int) -> Transformer:
    model = Transformer(checkpoint.manifest.model.model_copy(update={"layers": layers}), Sharing(blocks=layers))
    model.double().load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})
    return model


def _loss(model: Transformer, config: PhaseConfig) -> torch.Tensor:
    """Return the loss of the first step after the shallow phase, from its samples."""
    corpus, sequences = load_corpus(config.data, config.model.sequence_length), config.batch.sequences
    windows = Stream(corpus.train, config.model.sequence_length, config.data.seed).windows(
        STEPS * sequences, (STEPS + 1) * sequences
    )
    tokens = torch.from_numpy(windows).long()
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def _rank(rank: int, world: int, config: PhaseConfig) -> None:
    torch.set_num_threads(1)
    train_phase(config, open_corpus(config), Ranks(rank, world, torch.device("cpu")), lambda: False)


def _train(config: PhaseConfig) -> None:
    if config.ranks == 1:
        _rank(0, 1, config)
    else:
        run_ranks(_rank, config.ranks, config.ranks, config)


def _first_loss(config: PhaseConfig) -> float:
    lines = map(json.loads, (Path(config.work_directory) / "metrics.jsonl").read_text().splitlines())
    return float(next(line["loss"] for line in lines if line["step"] == STEPS + 1))


CASES = [
    ("own layers", "one rank", "shards"),
    ("own layers side by side", "shards", "pipeline"),
    ("shared before and after", "pipeline", "disk"),
    ("cycle of shared blocks", "disk", "one rank"),
    ("segments of shared blocks", "one rank", "pipeline"),
    ("growth and delink at once", "shards", "one rank"),
    ("experts", "expert ranks", "shards"),
    ("experts alone shared", "one rank", "expert ranks"),
    ("dense layers", "pipeline", "expert ranks"),
]


@pytest.mark.processor
@pytest.mark.parametrize(("growth", "before", "after"), CASES)
def test_first_step_of_grown_phase_is_that_of_plain_model(
    growth: str, before: str, after: str, job_body: Any, tmp_path: Path, config: Any, delink_of: Any
) -> None:
    """Loss and gradients to 1e-12, at any layout before and after. The engine's gradients follow from the first moments
    before and after the step."""
    _grow(job_body, growth, before, after)
    _train(config(0))
    delink(delink_of(1))
    store = CheckpointStore(tmp_path / "work", UID)
    shallow, start = newest(store, "shallow"), newest(store, "deep")
    assert [path.name for path in (tmp_path / "work" / "checkpoints" / start.manifest.name).iterdir()] == [
        "manifest.json"
    ]
    layers = GROWTHS[growth][1][0]
    assert (start.manifest.model.layers, shallow.manifest.model.layers) == (layers, GROWTHS[growth][0][0])
    oracle, as_loaded = (
        _plain(start, _own_layers(growth, reader, grown=grown), layers)
        for reader, grown in ((shallow, False), (start, True))
    )
    for name, parameter in oracle.named_parameters():
        assert torch.equal(as_loaded.get_parameter(name), parameter), name
    loss = _loss(oracle, config(1))
    loss.backward()
    _train(config(1))
    assert _first_loss(config(1)) == pytest.approx(loss.item(), rel=0, abs=1e-12)
    end = newest(store, "deep")
    assert end.manifest.step == STEPS + 1
    gradients = {
        name: (end.tensor(name, "first_moment") - 0.9 * start.tensor(name, "first_moment")) / 0.1 for name in end.names
    }
    expected = _shared_gradients(growth, oracle)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-12, err_msg=name)


def _shared_gradients(growth: str, oracle: Transformer) -> dict[str, np.ndarray[Any, Any]]:
    """Return the gradients of the grown phase's blocks: sums over the layers that use them."""
    _, (many, _, sharing), _ = GROWTHS[growth]
    alone = sharing is not None and "parts" in sharing
    found: dict[str, Any] = {}
    for name, parameter in oracle.named_parameters():
        assert parameter.grad is not None
        if name.startswith("blocks."):
            _, number, rest = name.split(".", 2)
            layer = int(number)
            group = _group(sharing, many, layer)
            first = next(other for other in range(many) if _group(sharing, many, other) == group)
            own = layer if alone and not are_experts(name) else first if alone else group
            name = f"blocks.{own}.{rest}"
        found[name] = found.get(name, 0) + parameter.grad.numpy()
    return found


DIVISORS = {
    "own layers": (1, 1),
    "shared before and after": (1 / 3, 1),
    "cycle of shared blocks": (1, 1),
    "growth and delink at once": (2, 1),
    "experts": (1, 1),
    "experts alone shared": (1, 2 / 3),
}
"""Layers that used a block before, by layers that use one after: of blocks, and of sets of experts."""


@pytest.mark.parametrize("growth", DIVISORS)
def test_moments_of_grown_layers_follow_the_number_of_uses(
    growth: str, job_body: Any, config: Any, delink_of: Any
) -> None:
    """Reset also resets layers that are only copied. Measured is Scale, as layers that do not exist cannot be
    measured."""
    _grow(job_body, growth)
    job_body["spec"]["delink"] = {"optimizerState": "Measured"}
    assert config(0).measure is None
    _train(config(0))
    before, asked = newest(store_of(config(0)), "shallow"), delink_of(1)
    target = Target(asked.to_sharing, asked.to_model, asked.growth)
    for kind in get_args(OptimizerState):
        manifest = delinked(before.manifest, "deep", target, kind)
        after = Reader(manifest, before.checkpoints)
        assert manifest.optimizer_state == ("Scale" if kind == "Measured" else kind)
        for name, moment in product(after.names, KINDS[1:]):
            is_block = name.startswith("blocks.")
            divisor = DIVISORS[growth][are_experts(name)] ** (1 if moment == "first_moment" else 2) if is_block else 1
            factor = {"Copy": 1, "Reset": not is_block}.get(kind, 1 / divisor)
            expected = before.tensor(_source_of(name, after, before), moment)
            assert np.abs(expected).max() > 0
            np.testing.assert_allclose(after.tensor(name, moment), expected * factor, rtol=1e-15)
            assert after.updates(name) == (0 if kind == "Reset" and is_block else STEPS)


def _source_of(name: str, after: Reader, before: Reader) -> str:
    """Return the name of the tensor of the checkpoint before with the same weights."""
    kin = (other for other in before.names if other.split(".")[2:] == name.split(".")[2:])
    return next(other for other in kin if np.array_equal(before.tensor(other), after.tensor(name)))


def test_job_shares_then_grows_then_delinks(job_body: Any, tmp_path: Path, config: Any, delink_of: Any) -> None:
    """1 block of 2 layers, 1 block of 4 layers, 4 layers of their own; the second link leads past the first without
    steps between."""
    _grow(job_body, "shared before and after")
    spec = job_body["spec"]
    shallow, deep = spec["phases"]
    spec["model"]["layers"] = 4
    real = deep | {"name": "real", "sharing": None, "growth": None, "until": {"step": STEPS + 2}}
    spec["phases"] = [shallow, deep, real]
    _train(config(0))
    delink(delink_of(1))
    _train(config(1))
    delink(delink_of(2))
    store = CheckpointStore(tmp_path / "work", UID)
    before, after = newest(store, "deep"), newest(store, "real")
    assert after.manifest.link is not None
    assert after.manifest.link.folder == before.manifest.name == f"deep-{STEPS + 1:08d}"
    for layer, kind in product(range(4), KINDS):
        factor = {"weights": 1, "first_moment": 1 / 4, "second_moment": 1 / 16}[kind]
        old = before.tensor("blocks.0.ffn.up.weight", kind)
        assert np.array_equal(after.tensor(f"blocks.{layer}.ffn.up.weight", kind), old * factor)
    _train(config(2))
    assert newest(store, "real", complete=True).manifest.step == STEPS + 2


def test_grown_checkpoint_can_be_written_as_files_of_its_own(
    job_body: Any, tmp_path: Path, config: Any, delink_of: Any
) -> None:
    _grow(job_body, "shared before and after")
    _train(config(0))
    delink(delink_of(1))
    grown = newest(store_of(config(1)), "deep")
    folder = tmp_path / "whole" / grown.manifest.name
    folder.mkdir(parents=True)
    whole = Reader(materialize(grown, folder, lambda items, _: items), folder.parent)
    for kind in KINDS:
        arrays = whole.whole(kind)
        assert arrays.keys() == grown.whole(kind).keys()
        for name, array in grown.whole(kind).items():
            assert np.array_equal(arrays[name], array), (name, kind)


def test_grown_phase_resumes_and_its_fault_while_committing_is_repaired(
    job_body: Any, tmp_path: Path, config: Any, delink_of: Any, train: Any
) -> None:
    _grow(job_body, "own layers")
    job_body["spec"]["phases"][1]["until"]["step"] = STEPS + 4
    _train(config(0))
    _train(config(0, "whole"))
    delink(delink_of(1, "whole"))
    _train(config(1, "whole"))
    first = delink(delink_of(1))
    manifest = tmp_path / "work" / "checkpoints" / f"deep-{STEPS:08d}" / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text[: len(text) // 2])
    assert delink(delink_of(1)) == first
    assert manifest.read_text() == text
    calls = iter(range(100))
    assert train(config(1), stop=lambda: next(calls) == 1).outcome == "Yielded"
    assert train(config(1)).outcome == "Succeeded"
    whole, again = (newest(store_of(config(1, work)), "deep", complete=True) for work in ("whole", "work"))
    for kind, name in product(KINDS, whole.names):
        assert np.array_equal(whole.tensor(name, kind), again.tensor(name, kind)), (name, kind)


def test_pruning_keeps_the_files_of_a_grown_checkpoint(job_body: Any, config: Any, delink_of: Any) -> None:
    _grow(job_body, "own layers")
    _train(config(0))
    delink(delink_of(1))
    store = store_of(config(1))
    store.prune(keep_last=1, keep_every=None)
    found = newest(store, "deep")
    store.verify(found.manifest)
    assert set(found.whole()) == set(found.names)
