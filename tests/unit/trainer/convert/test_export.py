"""Checkpoints exported in foreign formats and read by those formats' own libraries."""

import json
from contextlib import closing
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers
from pseudoreal_trainer.checkpoint import reader
from pseudoreal_trainer.checkpoint.manifest import FileDigest
from pseudoreal_trainer.checkpoint.pieces import spans_of, tensors_of
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.checkpoint.writer import RankWriter
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.convert import huggingface
from pseudoreal_trainer.data.tokenizer.train import train_tokenizer, write_tokenizer
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.layout import Layout
from pseudoreal_trainer.plan.parts import parts_of, units_of_rank
from pseudoreal_trainer.plan.units import KINDS, units_of
from pseudoreal_trainer.training.start import load_weights

TEXT = "In the beginning, ünïcode 世界 \x00\x7f\n  and two spaces"


SWIGLU = {"size": 32, "activation": "SwiGLU"}


@pytest.fixture
def shared(job_body: Any, config: Any, train: Any, tmp_path: Path) -> Reader:
    """Return a float32 checkpoint of 4 layers that share 2 blocks."""
    return _trained({"feedForward": SWIGLU}, job_body, config, train, tmp_path)


def _trained(
    model: dict[str, Any],
    job_body: Any,
    config: Any,
    train: Any,
    tmp_path: Path,
    sharing: dict[str, Any] | None = None,
) -> Reader:
    job_body["spec"]["model"] |= model
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["phases"][0]["sharing"] = sharing or {"blocks": 2}
    train(config(0))
    found = CheckpointStore(tmp_path / "work", "11111111-2222").newest("pseudo")
    assert found is not None
    return found


def _export(checkpoint: Reader, kind: str, output: Path) -> Any:
    folder = checkpoint.checkpoints / checkpoint.manifest.name
    return CliRunner().invoke(main, ["export", str(folder), "--format", kind, "--output", str(output)])


@pytest.fixture
def mixture(job_body: Any, config: Any, train: Any, tmp_path: Path) -> Reader:
    """Return a checkpoint with experts that are never full."""
    experts = {"count": 5, "capacityFactor": "100"}
    return _trained({"feedForward": SWIGLU, "experts": experts}, job_body, config, train, tmp_path)


def test_transformers_computes_the_same_logits(shared: Reader, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    assert isinstance(_assert_same_logits(shared, tmp_path), LlamaForCausalLM)


def test_layers_that_share_experts_alone_get_a_copy_each(
    job_body: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    model = {"family": "Mixtral", "experts": TOP_K}
    sharing = {"blocks": 2, "pattern": "Segment", "parts": ["Experts"]}
    _assert_same_logits(_trained(model, job_body, config, train, tmp_path, sharing), tmp_path)


def test_tied_embeddings_are_one_matrix_there_too(job_body: Any, config: Any, train: Any, tmp_path: Path) -> None:
    """The vocabulary has more rows than there are tokens."""
    model = {"feedForward": SWIGLU, "embeddings": "Tied", "vocabularySize": 300}
    theirs = _assert_same_logits(_trained(model, job_body, config, train, tmp_path), tmp_path)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert theirs.lm_head.weight.shape == (300, 16)


def test_one_prototype_is_a_mixtral(mixture: Reader, tmp_path: Path) -> None:
    from transformers import MixtralForCausalLM

    theirs = _assert_same_logits(mixture, tmp_path)
    assert isinstance(theirs, MixtralForCausalLM)
    used: set[int] = set()
    for layer in theirs.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _, __, out: used.update(out[2].flatten().tolist()))
    theirs(torch.tensor([list(TEXT.encode())]))
    assert len(used) > 1, "tokens go to several experts, so the comparison means something"


def _assert_same_logits(shared: Reader, tmp_path: Path) -> Any:
    """Check that transformers computes our logits from the export, and return transformers' model."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "exported"
    ended = _export(shared, "huggingface", output)
    assert ended.exit_code == 0, ended.output
    tokenizer = AutoTokenizer.from_pretrained(output)
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids
    assert tokens.tolist() == [list(TEXT.encode())]
    assert tokenizer.decode(tokens[0]) == TEXT
    theirs = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    ours = Transformer(shared.manifest.model, shared.manifest.sharing)
    load_weights(ours, shared)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)
    return theirs


TOP_K = {"type": "TopK", "count": 5, "topK": {"perToken": 2, "size": 24}}
YARN = {"type": "Yarn", "yarn": {"factor": "4", "originalSequenceLength": 16}}
LLAMA3 = {"type": "Llama3", "llama3": {"factor": "8", "originalSequenceLength": 16}}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"family": "Llama3", "attention": {"heads": 4, "keyValueHeads": 2, "rotary": {"scaling": LLAMA3}}},
    "Qwen2": {"family": "Qwen2", "attention": {"heads": 2, "window": {"size": 5, "layers": [1, 3]}}},
    "Qwen3": {"family": "Qwen3", "attention": {"heads": 2, "headSize": 12, "rotary": {"scaling": YARN}}},
    "Mistral": {"family": "Mistral", "attention": {"heads": 2, "window": {"size": 5, "layers": [0, 1, 2, 3]}}},
    "Olmo2": {"family": "OLMo2"},
    "Mixtral": {"family": "Mixtral", "experts": TOP_K, "attention": {"heads": 2, "window": {"size": 5}}},
    "Qwen3Moe": {"family": "Qwen3MoE", "experts": TOP_K | {"denseLayers": [1, 3]}},
    "Qwen3Moe, with windows": {
        "family": "Qwen3MoE",
        "experts": TOP_K,
        "attention": {"heads": 2, "window": {"size": 5}},
    },
}
SCALINGS = {
    "Llama": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "Qwen3": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
}
"""Entries of `rope_scaling` as version 4 of transformers reads them, without the original sequence length."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_exported_as_itself(name: str, job_body: Any, config: Any, train: Any, tmp_path: Path) -> None:
    model: dict[str, Any] = {"feedForward": {"size": 32}, **FAMILIES[name]}
    theirs = _assert_same_logits(_trained(model, job_body, config, train, tmp_path), tmp_path)
    assert type(theirs).__name__ == f"{name.partition(',')[0]}ForCausalLM"
    config_json = json.loads((tmp_path / "exported" / "config.json").read_text())
    scaling = SCALINGS.get(name) and SCALINGS[name] | {"original_max_position_embeddings": 16}
    assert config_json.get("rope_scaling") == scaling
    if scaling and scaling["rope_type"] == "yarn":
        ratio = config_json["max_position_embeddings"] / scaling["original_max_position_embeddings"]
        assert ratio == scaling["factor"], "version 4 takes the ratio as the factor, whatever rope_scaling says"


def test_every_byte_is_its_own_token(shared: Reader, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    _export(shared, "huggingface", tmp_path / "exported")
    tokenizer = Tokenizer.from_file(str(tmp_path / "exported" / "tokenizer.json"))
    for character in map(chr, range(0x800)):
        assert tokenizer.encode(character).ids == list(character.encode())


REFUSED = [
    ({}, "model.feedForward.activation is GELU, and transformers has no model with that beside the rest of this one"),
    ({"experts": {"count": 4}}, "model.feedForward.activation is GELU, and transformers has no model with that"),
    ({"feedForward": SWIGLU, "norm": {"placement": "Both"}}, "model.norm.placement is Both, and transformers has no"),
    (
        {"feedForward": SWIGLU, "experts": {"count": 4, "prototypes": 2}},
        "model.experts.prototypes is 2, and a Mixtral has one router over all experts of a layer; export this one as",
    ),
    (
        {"feedForward": SWIGLU, "experts": TOP_K | {"topK": {"perToken": 2, "biasUpdateRate": "0.001"}}},
        "model.experts.topK.biasUpdateRate is 0.001, and transformers has no model with that beside the rest of this",
    ),
    (
        {"family": "Qwen3MoE", "experts": TOP_K, "attention": {"heads": 2, "window": {"size": 5, "layers": [1]}}},
        "model.attention.window.layers is [1], and transformers has no model with that beside the rest of this one",
    ),
    (
        {"feedForward": SWIGLU, "logitSoftCap": "30"},
        "model.logitSoftCap is 30, and transformers has no model with that beside the rest of this one; export",
    ),
]


@pytest.mark.parametrize(("model", "says"), REFUSED)
def test_a_model_that_transformers_lacks_is_refused(
    model: dict[str, Any], says: str, job_body: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    job_body["spec"]["model"] |= model
    train(config(0), stop=lambda: True)
    found = CheckpointStore(tmp_path / "work", "11111111-2222").newest("pseudo")
    assert found is not None
    ended = _export(found, "huggingface", tmp_path / "exported")
    assert ended.exit_code == 78
    assert says in " ".join(ended.output.split())
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("trained", ["shared", "mixture"])
def test_safetensors_have_our_names(trained: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    shared: Reader = request.getfixturevalue(trained)
    assert _export(shared, "safetensors", tmp_path / "exported").exit_code == 0
    found = load_file(tmp_path / "exported" / "model.safetensors")
    assert found.keys() == shared.whole().keys()
    assert all(torch.equal(found[name], torch.from_numpy(array)) for name, array in shared.whole().items())


@pytest.mark.parametrize("trained", ["shared", "mixture"])
def test_torch_distributed_checkpoint_loads_it(trained: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    shared: Reader = request.getfixturevalue(trained)
    assert _export(shared, "dcp", tmp_path / "exported").exit_code == 0
    expected = {name: torch.from_numpy(array) for name, array in shared.whole().items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    load(found, storage_reader=FileSystemReader(tmp_path / "exported"), no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_an_existing_folder_is_not_touched(shared: Reader, tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    ended = _export(shared, "safetensors", tmp_path / "exported")
    assert ended.exit_code == 78
    assert "exists, and is not replaced" in ended.output


def test_the_ends_of_a_text_are_those_of_the_tokenizer(shared: Reader, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    write_tokenizer(tmp_path / "words", train_tokenizer(["in the beginning was the word"] * 3, 262))
    folder = shared.checkpoints / shared.manifest.name
    for tokenizer, numbers in ((str(tmp_path / "words"), (0, 1)), ("bytes", (None, None))):
        output = tmp_path / f"exported with {len(tokenizer)}"
        options = ["--format", "huggingface", "--output", str(output), "--tokenizer", tokenizer]
        assert CliRunner().invoke(main, ["export", str(folder), *options]).exit_code == 0
        for found in (AutoConfig.from_pretrained(output), AutoTokenizer.from_pretrained(output)):
            assert (found.bos_token_id, found.eos_token_id) == numbers


def test_an_end_that_only_another_file_names_is_found(shared: Reader, tmp_path: Path) -> None:
    """Named by its number in config.json, or by the text of a token of the base vocabulary."""
    from transformers import AutoConfig

    words, folder = tmp_path / "words", shared.checkpoints / shared.manifest.name
    write_tokenizer(words, train_tokenizer(["in the beginning was the word"] * 3, 262))
    (words / "tokenizer_config.json").unlink()
    (words / "config.json").write_text('{"eos_token_id": [261, 7]}')
    export = ["export", str(folder), "--format", "huggingface", "--tokenizer", str(words), "--output"]
    assert CliRunner().invoke(main, [*export, str(tmp_path / "numbered")]).exit_code == 0
    found = AutoConfig.from_pretrained(tmp_path / "numbered")
    assert (found.bos_token_id, found.eos_token_id) == (None, 261)
    (words / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    assert CliRunner().invoke(main, [*export, str(tmp_path / "named")]).exit_code == 0
    vocabulary = json.loads((words / "tokenizer.json").read_text())["model"]["vocab"]
    assert AutoConfig.from_pretrained(tmp_path / "named").eos_token_id == vocabulary["a"]


def test_an_export_that_fails_says_what_to_do_with_its_folder(
    shared: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, words = shared.checkpoints / shared.manifest.name, tmp_path / "words"
    words.mkdir()
    export = ["export", str(folder), "--format", "huggingface", "--output", str(tmp_path / "exported")]
    for content, says in (("{", "tokenizer.json is not JSON"), ("{}", "tokenizer.json is no tokenizer.json")):
        (words / "tokenizer.json").write_text(content)
        ended = CliRunner().invoke(main, [*export, "--tokenizer", str(words)])
        assert (ended.exit_code, says in ended.stderr) == (78, True)
        assert not (tmp_path / "exported").exists(), "nothing was written"

    def full(_: Path, __: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "write_tokenizer", full)
    ended = CliRunner().invoke(main, export)
    assert ended.exit_code == 78
    assert "No space left on device" in ended.stderr
    assert f"the files in {tmp_path / 'exported'} are incomplete: remove this folder, and export again" in ended.stderr


def test_tensors_are_written_in_portions(shared: Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding may be larger than the pod's memory."""
    assert _export(shared, "huggingface", tmp_path / "at once").exit_code == 0
    read, most = Reader.read, list[int]()

    def counted(self: Reader, name: str, kind: Any, begin: int, end: int) -> Any:
        most.append(end - begin)
        return read(self, name, kind, begin, end)

    monkeypatch.setattr(reader, "_CHUNK", 100)
    monkeypatch.setattr(Reader, "read", counted)
    assert _export(shared, "huggingface", tmp_path / "exported").exit_code == 0
    assert max(most) == 100
    files = [tmp_path / folder / "model.safetensors" for folder in ("at once", "exported")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.needs("tokenizers")
def test_a_tokenizer_that_cannot_be_read_is_a_sentence(shared: Reader, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    folder = str(shared.checkpoints / shared.manifest.name)
    ended = CliRunner().invoke(main, ["sample", folder, "--tokenizer", str(tmp_path)])
    assert (ended.exit_code, "is no tokenizer.json" in ended.stderr) == (78, True)


EXPERTS = {
    "mixtral": {"family": "Mixtral", "experts": TOP_K | {"count": 6}},
    "qwen3_moe": {"family": "Qwen3MoE", "experts": TOP_K | {"count": 6, "denseLayers": [1, 3]}},
}


@pytest.mark.parametrize("cut", [{"expert_ranks": 2}, {"expert_ranks": 2, "tensor_ranks": 2}], ids=str)
@pytest.mark.parametrize("model_type", EXPERTS)
def test_experts_that_four_ranks_saved_are_exported_as_those_of_one(
    model_type: str, cut: dict[str, int], job_body: Any, config: Any, train: Any, tmp_path: Path
) -> None:
    one = _trained(EXPERTS[model_type], job_body, config, train, tmp_path, {"blocks": 4})
    spread = _saved_by_four(one, tmp_path / "spread", cut)
    slices = {name: tensor.column_slices for name, tensor in spread.manifest.tensors.items()}
    is_sliced = "tensor_ranks" in cut
    assert all(
        (n > 1) == (is_sliced and name.endswith("output.weight")) for name, n in slices.items() if "ffn" not in name
    )
    pieces = [tensor.pieces for name, tensor in spread.manifest.tensors.items() if ".experts." in name]
    assert min(map(len, pieces)) > 1, "several ranks saved a part of each tensor"
    assert all(of_one.begin == before.end for found in pieces for before, of_one in pairwise(found)), (
        "the parts of a tensor are in order and adjacent"
    )
    for checkpoint, output in ((one, "of one"), (spread, "of four")):
        assert _export(checkpoint, "huggingface", tmp_path / output).exit_code == 0
    found, expected = ({f.name: f.read_bytes() for f in (tmp_path / n).iterdir()} for n in ("of four", "of one"))
    assert found == expected
    assert json.loads(found["config.json"])["model_type"] == model_type


def _saved_by_four(source: Reader, work: Path, cut: dict[str, Any]) -> Reader:
    """Save the same weights as four ranks do, with experts or matrices cut over them; return the checkpoint."""
    manifest, dtype = source.manifest, source.dtype
    model, sharing = manifest.model, manifest.sharing
    layout = Layout(
        layer_blocks=blocks_of_layers(sharing, model.layers),
        vocabulary=model.vocabulary_size,
        layer_experts=experts_of_layers(sharing, model),
        pipeline=1,
        data=4,
        micro_batches=1,
        sharding="Full",
        **cut,
    )
    units, store = units_of(model, sharing), CheckpointStore(work, manifest.job.uid)
    folder, files = store.begin(manifest), dict[str, FileDigest]()
    for rank in range(4):
        own = units_of_rank(layout, units, rank)
        parts = [parts_of(own[unit], span) for unit, span in spans_of(layout, own, rank).items()]
        with closing(RankWriter(folder, rank, parts, dtype)) as writer:
            for of_unit, kind in product(parts, KINDS):
                for part in of_unit:
                    writer.write(kind, source.read(part.name, kind, part.begin, part.end, part.column_slices))
            files |= writer.finish()
    saved = manifest.revised(files=files, tensors=tensors_of(layout, units, dtype))
    store.commit(saved)
    return store.reader(saved)
