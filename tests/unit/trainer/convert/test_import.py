"""Jobs that start from weights saved by transformers, and the export back to transformers."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.plan.units import KINDS
from pseudoreal_trainer.storage.files import FileContent
from pseudoreal_trainer.storage.objects import ObjectStorage
from pseudoreal_trainer.storage.path import ObjectPath
from pseudoreal_trainer.storage.services import StorageUnavailable
from pseudoreal_trainer.training.start import load_weights
from structlog.testing import capture_logs

from tests.support.file_server import Answer, serving
from tests.support.forked import run_ranks
from tests.support.hub import FIRST, SECOND, Hub
from tests.unit.trainer.convert.support.published import FAMILIES, LENGTH, begin, begin_with, edit, tensors
from tests.unit.trainer.storage.support.object_server import Bucket

TOKENS = torch.randint(260, (2, LENGTH), generator=torch.Generator().manual_seed(1))
LLAMA = FAMILIES["Llama"]


def _exported(checkpoint: Reader, output: Path, *options: str) -> Path:
    folder = checkpoint.checkpoints / checkpoint.manifest.name
    arguments = ["export", str(folder), "--format", "huggingface", "--output", str(output), *options]
    ended = CliRunner().invoke(main, arguments)
    assert ended.exit_code == 0, ended.output
    return output


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found = model(TOKENS)
    logits: torch.Tensor = found if isinstance(found, torch.Tensor) else found.logits
    return logits


@pytest.mark.parametrize("name", FAMILIES)
def test_export_of_imported_weights_equals_the_original(name: str, job_body: Any, config: Any, tmp_path: Path) -> None:
    """Tensors are equal to the bit, config.json keeps every entry, and transformers computes the same logits."""
    from transformers import AutoModelForCausalLM

    source = tmp_path / "theirs"
    FAMILIES[name].saved(source)
    begin_with(source, FAMILIES[name], job_body)
    checkpoint = begin(config(0))
    output = _exported(checkpoint, tmp_path / "back", "--dtype", "bfloat16", "--file-size", "40k")
    before, after = tensors(source), tensors(output)
    assert before.keys() == after.keys()
    for tensor in before:
        assert before[tensor].dtype == after[tensor].dtype == torch.bfloat16
        assert torch.equal(before[tensor].view(torch.int16), after[tensor].view(torch.int16)), tensor
    wanted, found = (json.loads((folder / "config.json").read_text()) for folder in (source, output))
    assert {key: found[key] for key in wanted} == wanted
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"]
    theirs, again = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, output))  # type: ignore[no-untyped-call]
    assert torch.equal(_logits(again), _logits(theirs))
    ours = Transformer(checkpoint.manifest.model, checkpoint.manifest.sharing)
    load_weights(ours, checkpoint)
    torch.testing.assert_close(_logits(ours), _logits(theirs.float()), rtol=0, atol=2e-5)


def test_a_job_begins_at_step_0_with_moments_of_zero(job_body: Any, config: Any, tmp_path: Path) -> None:
    LLAMA.saved(tmp_path / "theirs")
    begin_with(tmp_path / "theirs", LLAMA, job_body)
    checkpoint = begin(config(0))
    manifest = checkpoint.manifest
    assert (manifest.step, manifest.tokens, manifest.updates.of("embedding")) == (0, 0, 0)
    for kind in KINDS[1:]:
        assert all(not array.any() for array in checkpoint.whole(kind).values())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_other_types_are_widened(dtype: torch.dtype, job_body: Any, config: Any, tmp_path: Path) -> None:
    LLAMA.saved(tmp_path / "theirs", dtype)
    begin_with(tmp_path / "theirs", LLAMA, job_body)
    output = _exported(begin(config(0)), tmp_path / "back", "--dtype", "float32")
    assert [file.name for file in output.glob("*.safetensors")] == ["model.safetensors"]
    before, after = tensors(tmp_path / "theirs"), tensors(output)
    assert {tensor.dtype for tensor in before.values()} == {dtype}
    assert all(torch.equal(after[name], before[name].float()) for name in before)


def test_weights_in_one_file(job_body: Any, config: Any, tmp_path: Path) -> None:
    model = LLAMA.saved(tmp_path / "theirs")
    model.save_pretrained(tmp_path / "one")
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    begin_with(tmp_path / "one", LLAMA, job_body)
    output = _exported(begin(config(0)), tmp_path / "back", "--dtype", "bfloat16", "--file-size", "40k")
    before, after = tensors(tmp_path / "one"), tensors(output)
    assert all(torch.equal(before[name], after[name]) for name in before)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in before.values())
    sizes = {
        file: sum(before[name].nbytes for name, place in index["weight_map"].items() if place == file)
        for file in index["weight_map"].values()
    }
    assert len(sizes) > 2
    assert max(sizes.values()) <= 40_000


def test_an_older_config_means_the_same(job_body: Any, config: Any, tmp_path: Path) -> None:
    """Version 4 of transformers writes rope_theta, rope_scaling and torch_dtype."""

    def older(content: dict[str, Any]) -> None:
        rope = content.pop("rope_parameters")
        content |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        content["torch_dtype"] = content.pop("dtype")

    LLAMA.saved(tmp_path / "theirs")
    edit(tmp_path / "theirs" / "config.json", older)
    wanted = json.loads((tmp_path / "theirs" / "config.json").read_text())
    begin_with(tmp_path / "theirs", LLAMA, job_body)
    output = _exported(begin(config(0)), tmp_path / "back", "--dtype", "bfloat16")
    found = json.loads((output / "config.json").read_text())
    assert {key: found[key] for key in wanted} == wanted
    assert found["rope_parameters"] == wanted["rope_scaling"] | {"rope_theta": wanted["rope_theta"]}


@pytest.mark.parametrize("original", [{}, {"original_max_position_embeddings": LENGTH}], ids=["implied", "named"])
def test_export_of_imported_yarn_weights_keeps_the_number_of_positions(
    original: dict[str, int], job_body: Any, config: Any, tmp_path: Path
) -> None:
    """Sequences are longer than max_position_embeddings. From this number transformers computes the frequencies:
    version 5 takes it as the original length if none is named, version 4 divides it by the original length."""
    from transformers import AutoModelForCausalLM

    def older(content: dict[str, Any]) -> None:
        rope = content.pop("rope_parameters")
        content |= {"rope_theta": rope["rope_theta"], "max_position_embeddings": LENGTH}
        content["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, **original}

    family, source = FAMILIES["Qwen3"], tmp_path / "theirs"
    family.saved(source)
    edit(source / CONFIG, older)
    begin_with(source, family, job_body)
    job_body["spec"]["model"]["sequenceLength"] = 4 * LENGTH
    output = _exported(begin(config(0)), tmp_path / "back", "--dtype", "bfloat16")
    found = json.loads((output / CONFIG).read_text())
    assert (found["max_position_embeddings"], found["rope_scaling"].keys()) == (
        LENGTH,
        {"rope_type", "factor", *original},
    )
    theirs, again = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (source, output))  # type: ignore[no-untyped-call]
    assert torch.equal(_logits(again), _logits(theirs))


def test_a_head_that_was_saved_beside_a_tied_embedding(job_body: Any, config: Any, tmp_path: Path) -> None:
    """Some publishers store the matrix twice; both copies must be equal."""
    from safetensors.torch import load_file, save_file

    family, folder = FAMILIES["Qwen2"], tmp_path / "theirs"
    model = family.saved(folder)
    embedding = model.model.embed_tokens.weight.detach().clone()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = folder / index["weight_map"]["model.norm.weight"]
    edit(folder / "model.safetensors.index.json", lambda c: c["weight_map"].update({"lm_head.weight": file.name}))
    held = load_file(file)
    save_file(held | {"lm_head.weight": embedding}, file)
    begin_with(folder, family, job_body)
    checkpoint = begin(config(0))
    assert np.array_equal(checkpoint.tensor("embedding.weight"), embedding.float().numpy())
    embedding[3, 5] += 1
    save_file(held | {"lm_head.weight": embedding}, file)
    with pytest.raises(InvalidJobError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        begin(config(0, "other"))


CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def _set(**entries: Any) -> Any:
    return lambda content: content.update(entries)


def _drop(name: str) -> Any:
    return lambda content: content.pop(name)


REFUSED: dict[str, tuple[str, Any, str]] = {
    "another architecture": (
        CONFIG,
        _set(model_type="gpt2"),
        "has the model_type gpt2; those that can be read are",
    ),
    "another head": (CONFIG, _set(architectures=["LlamaForSequenceClassification"]), "has the architectures"),
    "an unknown entry": (
        CONFIG,
        _set(q_lora_rank=3),
        "has the entries q_lora_rank, which a llama is not",
    ),
    "a quantised model": (CONFIG, _set(quantization_config={}), "has the entries quantization_config"),
    "other sizes": (
        CONFIG,
        _set(num_attention_heads=8, intermediate_size=64),
        "spec.model.attention.heads is 4 and theirs is 8; spec.model.feedForward.size is 48 and theirs is 64; make",
    ),
    "other positions": (
        CONFIG,
        _set(rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
        "spec.model.attention.rotary.base is 500000.0 and theirs is 10000.0; spec.model.attention.rotary.scaling",
    ),
    "positions that nobody computes": (
        CONFIG,
        _set(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2}),
        "rope_parameters.rope_type is dynamic; those that are computed are default, llama3, yarn",
    ),
    "positions said twice": (CONFIG, _set(rope_theta=7.0), "says rope_theta twice, as 500000.0 and as 7.0"),
    "another activation": (
        CONFIG,
        _set(hidden_act="gelu"),
        "config.json has hidden_act gelu, but pseudoreal computes only models with hidden_act silu",
    ),
    "a length that is none": (
        CONFIG,
        _set(max_position_embeddings="64"),
        "max_position_embeddings is '64', and must be a whole number",
    ),
    "a size that is none": (CONFIG, _set(hidden_size="32"), "hidden_size is '32', and must be a whole number"),
    "a size that is missing": (CONFIG, _drop("vocab_size"), "vocab_size is missing, and must be a whole number"),
    "an entry of a wrong type": (CONFIG, _set(rope_parameters=[1]), "has an entry of another type than a llama has"),
    "a missing tensor": (
        INDEX,
        lambda content: content["weight_map"].pop("model.layers.1.mlp.up_proj.weight"),
        "the tensors model.layers.1.mlp.up_proj.weight are missing",
    ),
    "a tensor without a place": (
        INDEX,
        lambda content: content["weight_map"].update({"model.layers.4.mlp.up_proj.weight": "x"}),
        "the tensors model.layers.4.mlp.up_proj.weight have no place in the model",
    ),
    "a file outside of the folder": (
        INDEX,
        lambda content: content["weight_map"].update({"model.norm.weight": "../secret"}),
        "has no weight_map that names a file of the folder for each tensor",
    ),
    "a tensor in another file": (
        INDEX,
        lambda content: content["weight_map"].update(
            {"model.norm.weight": content["weight_map"]["model.embed_tokens.weight"]}
        ),
        "do not agree on the tensors model.norm.weight",
    ),
    "an index without a map": (INDEX, _drop("weight_map"), "has no weight_map"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "llama"
    LLAMA.saved(folder)
    return folder


@pytest.fixture
def copied(llama: Path, tmp_path: Path, job_body: Any) -> Path:
    """Return a copy of the weights, from which the job starts."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    for file in llama.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    begin_with(folder, LLAMA, job_body)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_the_job_are_refused(name: str, copied: Path, config: Any) -> None:
    file, change, says = REFUSED[name]
    edit(copied / file, change)
    with pytest.raises(InvalidJobError) as refused:
        begin(config(0))
    assert says in str(refused.value)
    assert str(copied) in str(refused.value)


def test_tensors_that_do_not_fit_are_refused(copied: Path, config: Any) -> None:
    """A tensor has another shape or an unsupported dtype, or its file is truncated, not safetensors or missing."""
    from safetensors.torch import load_file, save_file

    file = copied / json.loads((copied / INDEX).read_text())["weight_map"]["model.norm.weight"]
    held, content = load_file(file), file.read_bytes()
    for changed, says in (
        (held["model.norm.weight"][:-1], r"model.norm.weight has the shape \[31\], and in the model \[32\]"),
        (held["model.norm.weight"].to(torch.int16), "model.norm.weight is I16; the types that are read are"),
        (held["model.norm.weight"].to(torch.float8_e4m3fn), "model.norm.weight is F8_E4M3; the types"),
        (held["model.norm.weight"].double(), "model.norm.weight is float64, and would be rounded"),
    ):
        save_file(held | {"model.norm.weight": changed.contiguous()}, file)
        with pytest.raises(InvalidJobError, match=says):
            begin(config(0))
    for bad, says in (
        (content[:-1], "it is cut short"),
        (b"", "is no safetensors file"),
        (b"\xff" * 64, "is no safetensors file"),
        (b"\x02\0\0\0\0\0\0\0[]", "is no safetensors file"),
    ):
        file.write_bytes(bad)
        with pytest.raises(InvalidJobError, match=says):
            begin(config(0))
    file.unlink()
    with pytest.raises(InvalidJobError, match="is no Hugging Face checkpoint"):
        begin(config(0))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused_with_the_tensors_name(value: float, copied: Path, config: Any) -> None:
    from safetensors.torch import load_file, save_file

    name = "model.norm.weight"
    file = copied / json.loads((copied / INDEX).read_text())["weight_map"][name]
    held = load_file(file)
    held[name][5] = value
    save_file(held, file, metadata={"format": "pt"})
    with pytest.raises(InvalidJobError, match=rf"element 5 of {name} is {value}; take weights that are numbers"):
        begin(config(0))


@pytest.mark.usefixtures("copied")
def test_another_model_of_the_job_is_refused_by_its_fields(job_body: Any, config: Any) -> None:
    job_body["spec"]["model"] |= {"embeddings": "Tied", "logitSoftCap": "30", "norm": {"epsilon": "1e-6"}}
    job_body["spec"]["model"]["attention"]["window"] = {"size": 5}
    with pytest.raises(InvalidJobError) as refused:
        begin(config(0))
    for says in (
        "spec.model.embeddings is Tied and theirs is Separate",
        "spec.model.logitSoftCap is 30 and theirs is not set",
        "spec.model.norm.epsilon is 1e-06 and theirs is 1e-05",
        "spec.model.attention.window.size is 5 and theirs is not set",
    ):
        assert says in str(refused.value)


@pytest.mark.parametrize(("trained", "warns"), [(LENGTH - 1, True), (LENGTH, False), (2 * LENGTH, False)])
def test_sequences_longer_than_trained_are_told(
    trained: int, warns: bool, job_body: Any, config: Any, tmp_path: Path
) -> None:
    """Only the checking rank warns, once. The job trains all the same."""
    family = FAMILIES["Mistral, without a window"]
    family.saved(tmp_path / "theirs")
    edit(tmp_path / "theirs" / CONFIG, _set(max_position_embeddings=trained))
    begin_with(tmp_path / "theirs", family, job_body)
    with capture_logs() as logs:
        begin(config(0))
    told = [line for line in logs if line["event"] == "sequences_longer_than_trained"]
    assert [(line["log_level"], line["sequence_length"], line["trained_length"]) for line in told] == (
        [("warning", LENGTH, trained)] if warns else []
    )


def test_the_phases_go_on_without_the_weights(
    copied: Path, job_body: Any, config: Any, train: Any, delink_of: Any, tmp_path: Path
) -> None:
    """The weights are read only at the start. The entries of their config.json are still known at the end."""
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    begun = iter(range(100))
    train(config(0), stop=lambda: next(begun) >= 2)
    wanted = json.loads((copied / CONFIG).read_text())
    for file in copied.iterdir():
        file.unlink()
    train(config(0))
    delink(delink_of(1))
    train(config(1), stop=lambda: True)
    last = CheckpointStore(tmp_path / "work", "11111111-2222").newest("real")
    assert last is not None
    found = json.loads((_exported(last, tmp_path / "back") / CONFIG).read_text())
    assert found["eos_token_id"] == 8
    assert {key: value for key, value in found.items() if key in wanted} == wanted | {"dtype": "float32"}


def test_the_first_loss_is_that_of_transformers(copied: Path, config: Any, train: Any) -> None:
    """Compared over the validation text, before the first step."""
    from pseudoreal_trainer.data.corpus import load_corpus
    from pseudoreal_trainer.data.stream import take_windows
    from pseudoreal_trainer.training.validation import window_starts
    from transformers import AutoModelForCausalLM

    first = config(0)
    message = train(first, stop=lambda: True)
    corpus = load_corpus(first.data, LENGTH)
    windows = torch.from_numpy(
        take_windows(corpus.validation, window_starts(corpus, LENGTH, 64), LENGTH).astype(np.int64)
    )
    theirs = AutoModelForCausalLM.from_pretrained(copied, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        logits = theirs(windows[:, :-1]).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    assert message.start_validation_loss == pytest.approx(float(expected), abs=1e-5)


LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2, full": {"workers": 2, "parallelism": {"stateSharding": "Full"}, "offload": {"home": "Host"}},
    "pipeline 2, disk": {"workers": 2, "parallelism": {"pipeline": 2, "schedule": "1F1B"}, "offload": {"home": "Disk"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_reads_its_share_alone(layout: str, copied: Path, job_body: Any, config: Any, tmp_path: Path) -> None:
    expected = begin(config(0, "alone"))
    job_body["spec"]["phases"][0] |= LAYOUTS[layout]
    run_ranks(_counted, 2, 2, config(0), tmp_path)
    found = CheckpointStore(tmp_path / "work", "11111111-2222").newest("pseudo")
    assert found is not None
    for name, array in expected.whole().items():
        assert found.tensor(name).tobytes() == array.tobytes()
    size = sum(tensor.nbytes for tensor in tensors(copied).values())
    read = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    share = sum(sum(each["numbers"]) for each in read)
    assert share == size, "together the ranks read each number once"
    assert max(sum(each["numbers"]) for each in read) < 0.7 * size
    headers = [sum(each["headers"]) for each in read]
    files = [*copied.glob("*.safetensors")]
    assert headers[0] == sum(8 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)
    assert headers[1] <= headers[0]


def _counted(rank: int, world: int, config: Any, folder: Path) -> None:
    """Start the phase and record how many bytes of headers and of numbers this rank reads."""
    read: dict[str, list[int]] = {"headers": [], "numbers": []}
    original = FileContent.read_into

    def read_into(self: FileContent, begin: int, out: Any) -> None:
        with self._path.open("rb") as file:
            begun = int.from_bytes(file.read(8), "little") + 8
        read["headers" if begin < begun else "numbers"].append(len(out))
        original(self, begin, out)

    FileContent.read_into = read_into  # type: ignore[method-assign]
    begin(config, Ranks(rank, world, torch.device("cpu")))
    (folder / f"{rank}.json").write_text(json.dumps(read))


def test_weights_in_object_storage(copied: Path, bucket: Bucket, job_body: Any, config: Any) -> None:
    expected = begin(config(0, "alone"))
    for file in copied.iterdir():
        bucket.write(f"llama/{file.name}", file.read_bytes())
    job_body["spec"]["checkpoint"]["startFrom"]["huggingFace"]["path"] = f"{bucket.url}/llama"
    found = begin(config(0))
    assert all(found.tensor(name).tobytes() == array.tobytes() for name, array in expected.whole().items())
    job_body["spec"]["checkpoint"]["startFrom"]["huggingFace"]["path"] = f"{bucket.url}/nowhere"
    with pytest.raises(InvalidJobError, match=f"{bucket.url}/nowhere is no Hugging Face checkpoint"):
        begin(config(0, "other"))


@pytest.fixture
def hub(copied: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The hub with the weights at one commit."""
    files = {file.name: file.read_bytes() for file in copied.iterdir()}
    with serving(Hub(repository="owner/llama", commits={FIRST: files})) as served:
        monkeypatch.setenv("HF_ENDPOINT", served.url)
        yield served


@pytest.mark.usefixtures("hub")
def test_weights_on_the_hub(job_body: Any, config: Any) -> None:
    expected = begin(config(0, "alone"))
    job_body["spec"]["checkpoint"]["startFrom"]["huggingFace"]["path"] = f"hf://owner/llama@{FIRST}"
    found = begin(config(0))
    assert all(found.tensor(name).tobytes() == array.tobytes() for name, array in expected.whole().items())


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("owner/llama", f"names no revision, and weights must not .*digits: it is now at hf://owner/llama@{FIRST}"),
        ("owner/llama@main", f"names main, and weights must not .* it is now at hf://owner/llama@{FIRST}"),
        (
            "owner/llama@gone",
            r"names gone, .*: which it has cannot be asked \(.*\); http.*/owner/llama/commits lists them",
        ),
        ("datasets/owner/llama", "is a dataset; weights are at hf://OWNER/NAME@COMMIT"),
        ("llama", "hf://llama is no address on the hub; these are"),
    ],
)
def test_weights_on_the_hub_without_a_commit_are_refused(place: str, says: str, job_body: Any, config: Any) -> None:
    job_body["spec"]["checkpoint"]["startFrom"]["huggingFace"]["path"] = f"hf://{place}"
    with pytest.raises(InvalidJobError, match=says):
        begin(config(0))


def test_weights_that_the_hub_does_not_give_are_a_sentence(hub: Hub, job_body: Any, config: Any) -> None:
    path = job_body["spec"]["checkpoint"]["startFrom"]["huggingFace"]
    path["path"] = f"hf://owner/llama@{SECOND}"
    with pytest.raises(TrainingError, match=f"the model owner/llama has no revision {SECOND}"):
        begin(config(0))
    path["path"] = f"hf://owner/other@{FIRST}"
    with pytest.raises(TrainingError, match="the model owner/other is not on the hub, or it is private"):
        begin(config(0))
    path["path"] = f"hf://owner/llama@{FIRST}/nowhere"
    with pytest.raises(InvalidJobError, match="nowhere is no Hugging Face checkpoint"):
        begin(config(0))
    hub.is_gated = True
    path["path"] = f"hf://owner/llama@{FIRST}"
    with pytest.raises(TrainingError, match="the model owner/llama is gated: accept its conditions on http"):
        begin(config(0))


def test_hub_that_fails_does_not_count_as_one_without_the_file(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    folder = ObjectPath(f"hf://owner/llama@{FIRST}")
    assert [ObjectStorage(folder / name).exists() for name in ("config.json", "none.json")] == [True, False]
    folder = ObjectPath(f"hf://owner/llama@{SECOND}")
    monkeypatch.setattr(hub, "respond", lambda *_: Answer(500))
    with pytest.raises(StorageUnavailable, match=r"config.json cannot be read from the hub: .*500"):
        ObjectStorage(folder / "config.json").exists()


@pytest.mark.usefixtures("copied")
def test_the_options_of_export(config: Any, tmp_path: Path) -> None:
    checkpoint = begin(config(0))
    folder = str(checkpoint.checkpoints / checkpoint.manifest.name)

    def invoke(*options: str) -> Any:
        return CliRunner().invoke(main, ["export", folder, "--output", str(tmp_path / "back"), *options])

    ended = invoke("--format", "safetensors", "--dtype", "bfloat16")
    assert (ended.exit_code, "are for --format huggingface" in ended.output) == (2, True)
    ended = invoke("--format", "huggingface", "--file-size", "five")
    assert (ended.exit_code, "five is no number of bytes such as 5G or 500M" in ended.output) == (2, True)
    ended = invoke("--format", "huggingface", "--tokenizer", str(tmp_path / "nowhere"))
    assert (ended.exit_code, f"there is no {tmp_path / 'nowhere'}" in ended.output) == (2, True)
    assert not (tmp_path / "back").exists()
    (tmp_path / "tokenizer").mkdir()
    for name in ("tokenizer.json", "generation_config.json", "unrelated.bin"):
        (tmp_path / "tokenizer" / name).write_text(f'"{name}"')
    assert invoke("--format", "huggingface", "--tokenizer", str(tmp_path / "tokenizer")).exit_code == 0
    assert (tmp_path / "back" / "tokenizer.json").read_text() == '"tokenizer.json"'
    assert (tmp_path / "back" / "generation_config.json").exists()
    assert not (tmp_path / "back" / "unrelated.bin").exists()
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["tokenizer_class"]
