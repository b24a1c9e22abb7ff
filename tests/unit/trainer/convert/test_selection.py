"""The published layers from which shared blocks start."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pseudoreal_api.spec.checkpoint import BlockOrigins
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.convert.selection import layers_of_blocks
from pseudoreal_trainer.errors import InvalidJobError, UnfitWeights
from pseudoreal_trainer.plan.units import are_experts, block_of
from structlog.testing import capture_logs

from tests.unit.trainer.convert.support.published import (
    FAMILIES,
    LAYERS,
    LENGTH,
    begin,
    begin_with,
    layer_tensor,
    tensors,
)


def _model(layers: int, **fields: Any) -> Model:
    sizes = {"layers": layers, "hiddenSize": 8, "attention": {"heads": 1}, "sequenceLength": 8}
    return Model.model_validate(sizes | {"feedForward": {"size": 8}} | fields)


def _chosen(of: int, blocks: int, pattern: str = "Cycle", **origins: Any) -> list[tuple[int, ...]]:
    """Return the layers chosen for each block of a model with `of` layers."""
    sharing = Sharing.model_validate({"blocks": blocks, "pattern": pattern})
    return [*layers_of_blocks(BlockOrigins.model_validate(origins), _model(of), _model(of), sharing)]


KNOWN = [
    ({"type": "Evenly"}, 18, 9, "Cycle", [0, 2, 4, 6, 9, 11, 13, 15, 17]),
    ({"type": "Evenly"}, 8, 4, "Segment", [0, 2, 5, 7]),
    ({"type": "Evenly"}, 8, 1, "Cycle", [0]),
    ({"type": "Lower"}, 8, 4, "Segment", [0, 1, 2, 3]),
    ({"type": "Listed", "layers": [7, 0]}, 8, 2, "Cycle", [7, 0]),
]


@pytest.mark.parametrize(("origins", "layers", "blocks", "pattern", "expected"), KNOWN)
def test_each_block_starts_from_the_expected_layer(
    origins: dict[str, Any], layers: int, blocks: int, pattern: str, expected: list[int]
) -> None:
    assert _chosen(layers, blocks, pattern, **origins) == [(layer,) for layer in expected]


def test_the_mean_is_of_the_layers_that_share_the_block() -> None:
    assert _chosen(6, 2, "Cycle", type="Average") == [(0, 2, 4), (1, 3, 5)]
    assert _chosen(6, 2, "Segment", type="Average") == [(0, 1, 2), (3, 4, 5)]


@given(st.integers(2, 12), st.integers(2, 12))
def test_even_layers_keep_the_first_and_the_last_and_nearly_equal_distances(blocks: int, times: int) -> None:
    layers = blocks * times
    chosen = [layer for (layer,) in _chosen(layers, blocks, type="Evenly")]
    assert (chosen[0], chosen[-1]) == (0, layers - 1)
    steps = {later - earlier for earlier, later in pairwise(chosen)}
    assert max(steps) - min(steps) <= 1


@pytest.mark.parametrize("kind", ["Evenly", "Lower", "Average"])
@pytest.mark.parametrize("pattern", ["Cycle", "Segment"])
def test_layers_of_their_own_begin_as_themselves(kind: str, pattern: str) -> None:
    assert _chosen(6, 6, pattern, type=kind) == [(layer,) for layer in range(6)]


def test_a_block_does_not_begin_as_a_layer_of_another_kind() -> None:
    experts = {"type": "TopK", "count": 4, "topK": {"perToken": 2}, "denseLayers": [0, 2]}
    model, sharing = _model(4, experts=experts), Sharing(blocks=2)
    assert layers_of_blocks(BlockOrigins(type="Lower"), model, model, sharing) == ((0,), (1,))
    assert layers_of_blocks(BlockOrigins(type="Average"), model, model, sharing) == ((0, 2), (1, 3))
    says = "block 1 would begin as layer 2, a dense one, and layer 1, which uses it, is one with experts"
    with pytest.raises(UnfitWeights, match=says):
        layers_of_blocks(BlockOrigins(type="Listed", layers=[0, 2]), model, model, sharing)


@pytest.fixture
def shared(job_body: Any, tmp_path: Path) -> Any:
    """Return a function that makes the job start 4 layers on 2 blocks from a Mistral; its arguments are the rule."""
    FAMILIES["Mistral"].saved(tmp_path / "theirs")

    def prepare(**blocks: Any) -> None:
        start = {"blocks": blocks} if blocks else {}
        begin_with(tmp_path / "theirs", FAMILIES["Mistral"], job_body, **start)
        job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}

    return prepare


NAMES = {"self_attn.k_proj.weight": "attention.key.weight", "input_layernorm.weight": "attention_norm.weight"}


@pytest.mark.parametrize(
    ("blocks", "layers"),
    [({}, [0, 3]), ({"type": "Lower"}, [0, 1]), ({"type": "Listed", "layers": [2, 2]}, [2, 2])],
)
def test_blocks_begin_as_the_layers_that_were_chosen(
    blocks: dict[str, Any], layers: list[int], shared: Any, config: Any, tmp_path: Path
) -> None:
    shared(**blocks)
    checkpoint = begin(config(0))
    theirs = tensors(tmp_path / "theirs")
    for block, layer in enumerate(layers):
        for name, ours in NAMES.items():
            assert np.array_equal(checkpoint.tensor(f"blocks.{block}.{ours}"), layer_tensor(theirs, layer, name))
    assert np.array_equal(checkpoint.tensor("norm.weight"), theirs["model.norm.weight"].float().numpy())


def test_blocks_begin_as_means_with_a_warning(shared: Any, config: Any, tmp_path: Path) -> None:
    shared(type="Average")
    with capture_logs() as logs:
        checkpoint = begin(config(0))
    theirs = tensors(tmp_path / "theirs")
    for block in (0, 1):
        for name, ours in NAMES.items():
            first, second = (layer_tensor(theirs, layer, name).astype(np.float64) for layer in (block, block + 2))
            expected = ((first + second) / 2).astype(np.float32)
            assert np.array_equal(checkpoint.tensor(f"blocks.{block}.{ours}"), expected)
    (warning,) = [line for line in logs if line["event"] == "layers_averaged"]
    assert (warning["log_level"], warning["blocks"]) == ("warning", [[0, 2], [1, 3]])


def test_the_mean_of_layers_that_were_delinked_is_the_block_again(
    job_body: Any, config: Any, train: Any, delink_of: Any, tmp_path: Path
) -> None:
    """The mean is exact, even for a sum of three equal layers: delinked, exported, and imported into a phase with
    sharing."""
    from click.testing import CliRunner
    from pseudoreal_trainer.cli.command import main

    job_body["spec"]["model"] = FAMILIES["Mistral"].model | {"layers": 6}
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    train(config(0))
    delink(delink_of(1))
    before = CheckpointStore(tmp_path / "work", "11111111-2222").newest("real")
    assert before is not None
    folder = str(before.checkpoints / before.manifest.name)
    arguments = ["export", folder, "--format", "huggingface", "--output", str(tmp_path / "exported")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    begin_with(tmp_path / "exported", FAMILIES["Mistral"], job_body, blocks={"type": "Average"})
    job_body["spec"]["model"] = FAMILIES["Mistral"].model | {"layers": 6}
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    again = begin(config(0, "again"))
    shared_before = CheckpointStore(tmp_path / "work", "11111111-2222").newest("pseudo")
    assert shared_before is not None
    for name, array in shared_before.whole().items():
        assert np.array_equal(again.tensor(name), array), name


EXPERT = "mlp.experts.1.up_proj.weight"
OWN = {"mlp.gate.weight": "router.weight", "self_attn.k_proj.weight": "attention.key.weight"}


@pytest.mark.parametrize(("blocks", "origins"), [({"type": "Lower"}, (1,)), ({"type": "Average"}, (1, 3))])
def test_experts_that_are_shared_alone_begin_as_those_of_layers_that_have_some(
    blocks: dict[str, Any], origins: tuple[int, ...], job_body: Any, config: Any, tmp_path: Path
) -> None:
    """Layers 1 and 3 of 4 have experts; with the pattern Cycle both use the second set."""
    family = FAMILIES["Qwen3 MoE"]
    family.saved(tmp_path / "theirs")
    begin_with(tmp_path / "theirs", family, job_body, blocks=blocks)
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2, "parts": ["Experts"]}
    checkpoint, theirs = begin(config(0)), tensors(tmp_path / "theirs")
    assert {block_of(name) for name in checkpoint.names if are_experts(name)} == {1}
    mean = np.mean([layer_tensor(theirs, layer, EXPERT).astype(np.float64) for layer in origins], axis=0)
    assert np.array_equal(checkpoint.tensor("blocks.1.experts.up.weight")[1], mean.astype(np.float32))
    for layer in (1, 3):
        for name, ours in OWN.items():
            assert np.array_equal(checkpoint.tensor(f"blocks.{layer}.{ours}"), layer_tensor(theirs, layer, name))


def test_experts_do_not_begin_as_a_dense_layer(job_body: Any, config: Any, tmp_path: Path) -> None:
    family = FAMILIES["Qwen3 MoE"]
    family.saved(tmp_path / "theirs")
    begin_with(tmp_path / "theirs", family, job_body, blocks={"type": "Listed", "layers": [0, 0]})
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2, "parts": ["Experts"]}
    says = "set 1 of the shared experts would start as the experts of layer 0, but this layer is dense"
    with pytest.raises(InvalidJobError, match=says):
        begin(config(0))


def _deeper(family: str, job_body: Any, folder: Path, layers: int, **start: Any) -> None:
    """Give the job `layers` layers, and the start from a published model of this family with fewer."""
    FAMILIES[family].saved(folder)
    begin_with(folder, FAMILIES[family], job_body, **start)
    job_body["spec"]["model"]["layers"] = layers


@pytest.mark.parametrize(
    ("kind", "sharing", "origins"),
    [
        ("Stack", None, [0, 1, 2, 3, 0, 1]),
        ("Interleave", None, [0, 0, 1, 2, 2, 3]),
        ("Stack", {"blocks": 3}, [0, 1, 2]),
        ("Interleave", {"blocks": 2, "pattern": "Segment"}, [0, 2]),
    ],
)
def test_more_layers_begin_as_those_that_were_published(
    kind: str, sharing: Any, origins: list[int], job_body: Any, config: Any, tmp_path: Path
) -> None:
    _deeper("Mistral", job_body, tmp_path / "theirs", 6, blocks={"type": kind})
    job_body["spec"]["phases"][0]["sharing"] = sharing
    checkpoint, theirs = begin(config(0)), tensors(tmp_path / "theirs")
    assert checkpoint.manifest.model.layers == 6
    blocks = {block_of(name) for name in checkpoint.names} - {None}
    assert blocks == {*range(len(origins))}
    for block, layer in enumerate(origins):
        for name, ours in NAMES.items():
            assert np.array_equal(checkpoint.tensor(f"blocks.{block}.{ours}"), layer_tensor(theirs, layer, name))
    assert np.array_equal(checkpoint.tensor("norm.weight"), theirs["model.norm.weight"].float().numpy())


@pytest.mark.parametrize("family", ["Mistral", "Qwen2", "Qwen3 MoE", "Mixtral"])
def test_export_after_more_layers_has_their_number(family: str, job_body: Any, config: Any, tmp_path: Path) -> None:
    """transformers loads it with the same logits, so config.json and the names of tensors agree."""
    from click.testing import CliRunner
    from pseudoreal_trainer.cli.command import main
    from pseudoreal_trainer.model.reference import Transformer
    from pseudoreal_trainer.training.start import load_weights
    from transformers import AutoModelForCausalLM

    _deeper(family, job_body, tmp_path / "theirs", 8, blocks={"type": "Stack"})
    if family == "Qwen3 MoE":
        job_body["spec"]["model"]["experts"]["denseLayers"] = [0, 2, 4, 6]
    checkpoint = begin(config(0))
    folder = str(checkpoint.checkpoints / checkpoint.manifest.name)
    arguments = ["export", folder, "--format", "huggingface", "--output", str(tmp_path / "exported")]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").eval()  # type: ignore[no-untyped-call]
    assert theirs.config.num_hidden_layers == 8
    ours = Transformer(checkpoint.manifest.model, checkpoint.manifest.sharing)
    load_weights(ours, checkpoint)
    tokens = torch.arange(2 * LENGTH).reshape(2, LENGTH)
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=2e-5)


def test_more_layers_share_experts_that_were_published(job_body: Any, config: Any, tmp_path: Path) -> None:
    """Layers 1 and 3 of the 4 published ones have experts, and so have 1, 3, 5 and 7 of the 8."""
    _deeper("Qwen3 MoE", job_body, tmp_path / "theirs", 8, blocks={"type": "Stack"})
    job_body["spec"]["model"]["experts"]["denseLayers"] = [0, 2, 4, 6]
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 4, "parts": ["Experts"]}
    checkpoint, theirs = begin(config(0)), tensors(tmp_path / "theirs")
    assert {block_of(name) for name in checkpoint.names if are_experts(name)} == {1, 3}
    for number in (1, 3):
        found = checkpoint.tensor(f"blocks.{number}.experts.up.weight")[1]
        assert np.array_equal(found, layer_tensor(theirs, number, EXPERT))
    for layer in (1, 3, 5, 7):
        for name, ours in OWN.items():
            assert np.array_equal(checkpoint.tensor(f"blocks.{layer}.{ours}"), layer_tensor(theirs, layer % 4, name))


@pytest.mark.parametrize("sharing", [None, {"blocks": 2, "parts": ["Experts"]}])
def test_layers_that_are_added_are_of_the_kind_of_those_that_they_begin_as(
    sharing: Any, job_body: Any, config: Any, tmp_path: Path
) -> None:
    _deeper("Qwen3 MoE", job_body, tmp_path / "theirs", 8, blocks={"type": "Interleave"})
    job_body["spec"]["phases"][0]["sharing"] = sharing
    with pytest.raises(InvalidJobError, match=r"would begin as layer .*change spec.checkpoint.startFrom.blocks.type"):
        begin(config(0))


def test_weights_with_fewer_layers_are_refused_with_the_type_that_takes_them(
    job_body: Any, config: Any, tmp_path: Path
) -> None:
    _deeper("Mistral", job_body, tmp_path / "theirs", 6)
    says = r"spec.model.layers is 6 and theirs is 4; .* or spec.checkpoint.startFrom.blocks.type Stack or Interleave"
    with pytest.raises(InvalidJobError, match=says):
        begin(config(0))
    job_body["spec"]["model"]["layers"] = 2
    job_body["spec"]["checkpoint"]["startFrom"]["blocks"] = {"type": "Stack"}
    with pytest.raises(InvalidJobError, match=r"spec.model.layers is 2 and theirs is 4; make spec.model say"):
        begin(config(0))


def test_the_job_is_refused_where_kinds_differ(job_body: Any, config: Any, tmp_path: Path) -> None:
    family = FAMILIES["Qwen3 MoE"]
    family.saved(tmp_path / "theirs")
    begin_with(tmp_path / "theirs", family, job_body, blocks={"type": "Listed", "layers": [0, LAYERS - 2]})
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    with pytest.raises(InvalidJobError, match="block 1 would begin as layer 2, a dense one"):
        begin(config(0))
