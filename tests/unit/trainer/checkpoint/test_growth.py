"""A growth writes only a manifest. Its first step is that of a plain model with the weights of the layers before."""

import json
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import OptimizerState, Sharing
from pseudoreal_trainer.checkpoint.delink import Target, delink, delinked
from pseudoreal_trainer.checkpoint.manifest import Link, Manifest, Piece, StoredTensor
from pseudoreal_trainer.checkpoint.materialize import materialize
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, store_of
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.data.corpus import load_corpus
from pseudoreal_trainer.data.stream import Stream
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import TrainingError
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.plan.parts import Part
from pseudoreal_trainer.plan.units import KINDS, are_experts
from pseudoreal_trainer.training.phase import train_phase
from pseudoreal_trainer.training.start import load_weights
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
    "groups of experts": {"offload": {"home": "Host", "expertGroups": 2}},
}
Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Growth:
    few: int
    """Layers of the phase before."""
    many: int
    pattern: str = "Stack"
    had: dict[str, Any] | None = None
    """Sharing of the phase before."""
    gets: dict[str, Any] | None = None
    experts: dict[str, Any] | None = None
    few_experts: int | None = None
    noise: float = 0
    initial: str = "Copy"

    def source(self, layer: int) -> int:
        stretched = [source for source in range(self.few) for _ in range(self.many)]
        return layer % self.few if self.pattern == "Stack" else stretched[layer * self.few]

    def owners(self, layer: int, *, grown: bool) -> tuple[int, int]:
        """Return the block of a layer, and its set of experts."""
        sharing, layers = (self.gets, self.many) if grown else (self.had, self.few)
        if sharing is None:
            return layer, layer
        blocks = sharing["blocks"]

        def group(of: int) -> int:
            cycle = sharing.get("pattern", "Cycle") == "Cycle"
            return int(of % blocks if cycle else of // (layers // blocks))

        first = next(other for other in range(layers) if group(other) == group(layer))
        return (layer, first) if "parts" in sharing else (group(layer), group(layer))


GROWTHS = {
    "own layers": Growth(2, 5),
    "own layers side by side": Growth(2, 5, "Interleave"),
    "shared before and after": Growth(2, 6, had={"blocks": 1}, gets={"blocks": 1}),
    "cycle of shared blocks": Growth(4, 8, had={"blocks": 2}, gets={"blocks": 4}),
    "segments of shared blocks": Growth(
        4, 6, "Interleave", {"blocks": 2, "pattern": "Segment"}, {"blocks": 2, "pattern": "Segment"}
    ),
    "growth and delink at once": Growth(2, 4, had={"blocks": 1}),
    "experts": Growth(2, 4, experts=MIXTURE),
    "experts alone shared": Growth(2, 6, "Interleave", {"blocks": 1} | ALONE, {"blocks": 2} | ALONE, MIXTURE),
    "dense layers": Growth(2, 4, experts=MIXTURE | {"denseLayers": [0, 2]}),
    "delink with noise": Growth(3, 3, had={"blocks": 1}, noise=0.25),
    "layers with noise": Growth(2, 5, "Interleave", noise=0.25),
    "outputs of zero": Growth(2, 5, initial="ZeroOutput"),
    "outputs of zero side by side, with noise": Growth(2, 6, "Interleave", noise=0.5, initial="ZeroOutput"),
    "outputs of zero in blocks that added layers share": Growth(
        2, 8, had={"blocks": 1}, gets={"blocks": 4, "pattern": "Segment"}, initial="ZeroOutput"
    ),
    "outputs of zero in experts": Growth(
        2, 4, experts=MIXTURE | {"count": 6}, few_experts=4, noise=0.5, initial="ZeroOutput"
    ),
    "more experts": Growth(2, 2, experts=MIXTURE | {"count": 8}, few_experts=4, noise=0.25),
    "more experts, an odd number of times": Growth(2, 2, experts=MIXTURE | {"count": 6}, few_experts=4, noise=0.25),
    "more experts in more sets of more layers": Growth(
        2, 4, "Interleave", {"blocks": 1} | ALONE, {"blocks": 2, "pattern": "Segment"} | ALONE, MIXTURE, 2, noise=0.5
    ),
}


def _grow(body: dict[str, Any], growth: Growth, before: str = "one rank", after: str = "one rank") -> None:
    """Make the job one of a shallow and a deep phase, in these layouts."""
    spec = body["spec"]
    spec["model"] |= {"layers": growth.many, "experts": growth.experts}
    spec["optimizer"]["clipping"] = {"mode": "None"}
    spec["data"]["validation"]["everySteps"] = STEPS
    spec["delink"] = {"noise": str(growth.noise)}
    shallow = {"layers": growth.few, "experts": growth.few_experts, "sharing": growth.had} | LAYOUTS[before]
    deep = {"growth": {"pattern": growth.pattern, "initial": growth.initial}, "sharing": growth.gets} | LAYOUTS[after]
    spec["phases"] = [
        {"name": "shallow", "until": {"step": STEPS}} | shallow,
        {"name": "deep", "until": {"step": STEPS + 1}} | deep,
    ]
    for phase in spec["phases"]:
        phase["batch"] = {"sequences": 6, "microBatches": 2}


def _grown_weights(growth: Growth, shallow: Reader, config: PhaseConfig) -> Arrays:
    """Return the weights of the grown phase at its start, from the tensors of the shallow phase: those of the first
    layer of a block, and as many experts as there are now, with noise in copies."""
    found = {name: shallow.tensor(name) for name in shallow.names if not name.startswith("blocks.")}
    fresh = build_model(config.model, config.sharing, config.data.seed + (1 << 32), torch.float64).state_dict()
    seen: dict[str, str] = {}
    for layer in range(growth.many):
        names = [name for name in shallow.names if name.startswith("blocks.")]
        new, old = growth.owners(layer, grown=True), growth.owners(growth.source(layer), grown=False)
        for source in names:
            _, number, rest = source.split(".", 2)
            kind = int(are_experts(source))
            name = f"blocks.{new[kind]}.{rest}"
            if int(number) != old[kind] or name in found:
                continue
            array, is_matrix = shallow.tensor(source), "norm" not in rest and "bias" not in rest
            first = 0 if f"{source}" in seen.values() else len(array)
            if growth.few_experts and ("experts." in rest or "router" in rest):
                array = array[np.arange(config.model.experts.count) % growth.few_experts]  # type: ignore[union-attr]
            sources = [growth.source(other) for other in range(layer)]
            if (
                growth.initial == "ZeroOutput"
                and growth.source(layer) in sources
                and rest.split(".")[-2] in ("output", "down")
            ):
                array = np.zeros_like(array)
            elif growth.noise and is_matrix:
                array = array.copy()
                array[first:] += growth.noise * fresh[name].numpy()[first:]
            seen[name] = source
            found[name] = array
    return found


def _plain(growth: Growth, weights: Arrays, config: PhaseConfig) -> Transformer:
    """Return a model in which each layer has its own copy of the weights of the grown phase."""
    own = {name: array for name, array in weights.items() if not name.startswith("blocks.")}
    for layer, name in product(range(growth.many), weights):
        head, number, rest = (*name.split(".", 2), "", "")[:3]
        if head == "blocks" and int(number) == growth.owners(layer, grown=True)[are_experts(name)]:
            own[f"blocks.{layer}.{rest}"] = weights[name]
    model = Transformer(config.model, Sharing(blocks=growth.many)).double()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in own.items()})
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
    ("delink with noise", "one rank", "shards"),
    ("layers with noise", "one rank", "pipeline"),
    ("outputs of zero", "one rank", "shards"),
    ("outputs of zero side by side, with noise", "one rank", "pipeline"),
    ("outputs of zero in blocks that added layers share", "one rank", "disk"),
    ("outputs of zero in experts", "one rank", "expert ranks"),
    ("more experts", "expert ranks", "shards"),
    ("more experts, an odd number of times", "shards", "expert ranks"),
    ("more experts in more sets of more layers", "one rank", "groups of experts"),
]


@pytest.mark.processor
@pytest.mark.parametrize(("name", "before", "after"), CASES)
def test_first_step_of_grown_phase_is_that_of_plain_model(
    name: str, before: str, after: str, job_body: Any, tmp_path: Path, config: Any, delink_of: Any
) -> None:
    """Loss and gradients to 1e-12, at any layout before and after. The engine's gradients follow from the first moments
    before and after the step."""
    growth = GROWTHS[name]
    _grow(job_body, growth, before, after)
    _train(config(0))
    delink(delink_of(1))
    store = CheckpointStore(tmp_path / "work", UID)
    shallow, start = newest(store, "shallow"), newest(store, "deep")
    folder = tmp_path / "work" / "checkpoints" / start.manifest.name
    assert [path.name for path in folder.iterdir()] == ["manifest.json"]
    assert (shallow.manifest.model.layers, start.manifest.model.layers) == (growth.few, growth.many)
    oracle = _plain(growth, _grown_weights(growth, shallow, config(1)), config(1))
    if not growth.noise:
        as_read = _plain(growth, start.whole(), config(1))
        assert all(torch.equal(as_read.get_parameter(name), one) for name, one in oracle.named_parameters())
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


def _shared_gradients(growth: Growth, oracle: Transformer) -> Arrays:
    """Return the gradients of the grown phase's blocks: sums over the layers that use them."""
    found: dict[str, Any] = {}
    for name, parameter in oracle.named_parameters():
        assert parameter.grad is not None
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            name = f"blocks.{growth.owners(int(layer), grown=True)[are_experts(name)]}.{rest}"
        found[name] = found.get(name, 0) + parameter.grad.numpy()
    return found


DIVISORS = {
    "own layers": (1, 1, 1),
    "shared before and after": (1 / 3, 1, 1),
    "cycle of shared blocks": (1, 1, 1),
    "growth and delink at once": (2, 1, 1),
    "experts": (1, 1, 1),
    "experts alone shared": (1, 1, 2 / 3),
    "more experts": (1, 2, 2),
    "more experts in more sets of more layers": (1, 2, 2),
}
"""Divisors of gradients, of blocks, of routers and of experts: layers that used a block before by layers that use one
after, times the copies of an expert."""


@pytest.mark.parametrize("growth", DIVISORS)
def test_moments_of_grown_layers_follow_the_number_of_uses(
    growth: str, job_body: Any, config: Any, delink_of: Any
) -> None:
    """Reset also resets layers that are only copied. Measured is Scale, as layers that do not exist cannot be
    measured."""
    _grow(job_body, GROWTHS[growth])
    job_body["spec"]["delink"] |= {"optimizerState": "Measured"}
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
            divisor = DIVISORS[growth][2 if are_experts(name) else int(".router." in name)] if is_block else 1
            factor = {"Copy": 1, "Reset": not is_block}.get(kind, divisor ** -(1 if moment == "first_moment" else 2))
            expected = before.tensor(_source_of(name, after, before), moment)
            assert np.abs(expected).max() > 0
            expected = np.resize(expected, after.shape(name))
            np.testing.assert_allclose(after.tensor(name, moment), expected * factor, rtol=1e-15)
            assert after.updates(name) == (0 if kind == "Reset" and is_block else STEPS)


def _source_of(name: str, after: Reader, before: Reader) -> str:
    """Return the name of the tensor of the checkpoint before with the same weights."""
    kin = (other for other in before.names if other.split(".")[2:] == name.split(".")[2:])
    found = after.tensor(name)
    return next(other for other in kin if np.array_equal(np.resize(before.tensor(other), found.shape), found))


@pytest.mark.parametrize("placement", ["Pre", "Post", "Both"])
def test_outputs_of_zero_keep_the_function_of_the_model(
    placement: str, job_body: Any, config: Any, delink_of: Any
) -> None:
    """To the bit, also where a norm follows the outputs, and after another transition without steps in between."""
    growth = Growth(2, 4, experts={"count": 2, "capacityFactor": "2"}, initial="ZeroOutput")
    _grow(job_body, growth)
    job_body["spec"]["model"]["norm"] = {"placement": placement}
    _train(config(0))
    delink(delink_of(1))
    shallow, deep = newest(store_of(config(0)), "shallow"), newest(store_of(config(1)), "deep")
    tokens = torch.arange(32).reshape(2, 16)
    again = delinked(deep.manifest, "again", Target(Sharing(blocks=4)), "Scale")
    logits = []
    for reader in (shallow, deep, Reader(again, deep.checkpoints)):
        model = Transformer(reader.manifest.model, reader.manifest.sharing).double()
        load_weights(model, reader)
        logits.append(model(tokens))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_experts_multiply_twice_without_a_step_between_if_the_files_numbers_divide(
    job_body: Any, config: Any, delink_of: Any
) -> None:
    _grow(job_body, GROWTHS["more experts, an odd number of times"])
    _train(config(0))
    before, asked = newest(store_of(config(0)), "shallow"), delink_of(1)
    assert asked.to_model is not None

    def target(experts: int) -> Target:
        mixture = asked.to_model.experts.model_copy(update={"count": experts})
        return Target(asked.to_sharing, asked.to_model.model_copy(update={"experts": mixture}), asked.growth)

    twice = delinked(delinked(before.manifest, "deep", target(8), "Scale"), "deeper", target(16), "Scale")
    at_once = delinked(before.manifest, "deeper", target(16), "Scale")
    for name, kind in product(Reader(twice, before.checkpoints).names, KINDS):
        one, other = (Reader(manifest, before.checkpoints).tensor(name, kind) for manifest in (twice, at_once))
        np.testing.assert_allclose(one, other, rtol=1e-15)
    between = delinked(before.manifest, "deep", target(6), "Scale")
    says = r"deep-00000003 has 6 experts, read from 4 of shallow-00000003, .*; train phase deep for a step at least"
    with pytest.raises(TrainingError, match=says):
        delinked(between, "deeper", target(12), "Scale")


def test_job_shares_then_grows_then_delinks(job_body: Any, tmp_path: Path, config: Any, delink_of: Any) -> None:
    """1 block of 2 layers, 1 block of 4 layers, 4 layers of their own; the second link leads past the first without
    steps between."""
    _grow(job_body, GROWTHS["shared before and after"])
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
    _grow(job_body, GROWTHS["shared before and after"])
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
    _grow(job_body, GROWTHS["own layers"])
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
    _grow(job_body, GROWTHS["own layers"])
    _train(config(0))
    delink(delink_of(1))
    store = store_of(config(1))
    store.prune(keep_last=1, keep_every=None)
    found = newest(store, "deep")
    store.verify(found.manifest)
    assert set(found.whole()) == set(found.names)


@given(st.data())
def test_rows_of_more_experts_repeat_those_of_few(data: st.DataObject) -> None:
    """Any range of a tensor, across any number of repetitions, with the divisors of single experts."""
    few, many, width = (data.draw(st.integers(1, most)) for most in (4, 9, 3))
    many = max(few, many)
    begin = data.draw(st.integers(0, many * width - 1))
    end = data.draw(st.integers(begin + 1, many * width))
    stored = np.random.default_rng(0).standard_normal((few, width))
    divisors = [float(1 + expert) for expert in range(few)]
    name = "blocks.0.experts.up.bias"
    with TemporaryDirectory() as folder:
        reader = _linked(Path(folder), name, stored, divisors, many)
        whole = np.resize(stored, (many, width))
        assert np.array_equal(reader.tensor(name), whole)
        assert np.array_equal(reader.read(name, "weights", begin, end), whole.flatten()[begin:end])
        second = whole / np.resize(divisors, many)[:, None]
        assert np.array_equal(reader.read(name, "second_moment", begin, end), second.flatten()[begin:end])
        assert reader.first_copy(name) == few


def _linked(folder: Path, name: str, stored: np.ndarray[Any, Any], divisors: list[float], experts: int) -> Reader:
    """Return a reader of a checkpoint with so many experts, by a link to files with those of `stored`."""
    (folder / "old-00000001").mkdir()
    whole = Part(name, stored.shape, 0, stored.size, 0)
    with closing(RankWriter(folder / "old-00000001", 0, [[whole]], "float64")) as writer:
        for kind in KINDS:
            writer.write(kind, stored)
        writer.finish()
    sizes = {"layers": 1, "hiddenSize": 4, "attention": {"heads": 2}, "sequenceLength": 4, "feedForward": {"size": 4}}
    link = {"folder": "old-00000001", "blocks": [0], "firstMomentDivisor": 1, "secondMomentDivisor": 1}
    pieces = [Piece(file=0, begin=0, end=stored.size)]
    fields: dict[str, Any] = {
        "model": Model.model_validate(sizes | {"experts": {"count": experts}}),
        "link": Link.model_validate(link | {"secondMomentDivisors": {name: divisors}}),
        "tensors": {name: StoredTensor(shape=stored.shape, dtype="float64", pieces=pieces)},
        "files_version": None,
    }
    return Reader(Manifest.model_construct(**fields), folder)
