"""`pseudoreal sample` writes the same text for every layout, home, phase and storage of a checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.delink import delink
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.model.sampling import Sampling, generate, readable
from pseudoreal_trainer.model.transformer import build_model

from tests.support.forked import run_ranks
from tests.unit.trainer.convert.support.published import begin
from tests.unit.trainer.storage.support.object_server import Bucket

PROMPT, COUNT = "In the beginning", 24
UID = "11111111-2222"


def _layout(workers: int, pipeline: int = 1, *, home: str = "Device", **parallelism: Any) -> dict[str, Any]:
    return {
        "workers": workers,
        "parallelism": {"pipeline": pipeline, **parallelism},
        "offload": {"home": home},
        "batch": {"sequences": 6, "microBatches": 2},
    }


LAYOUTS = {
    "one rank, disk": _layout(1, home="Disk"),
    "data 2, optimizer": _layout(2, stateSharding="Optimizer"),
    "data 2, full, host": _layout(2, stateSharding="Full", home="Host"),
    "pipeline 2, 1f1b, disk": _layout(2, 2, schedule="1F1B", home="Disk"),
    "pipeline 2 x data 2, gradients": _layout(4, 2, stateSharding="Gradients", home="Host"),
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, with key heads of their own number": {"embeddings": "Tied", "attention": {"heads": 4, "keyValueHeads": 2}},
    "experts": {"experts": {"type": "TopK", "count": 3, "topK": {"perToken": 2}, "denseLayers": [0, 2]}},
}


OF_OTHERS = ["data 2, full, host", "pipeline 2, 1f1b, disk"]
"""Layouts tested for the models other than the plain one."""


def _begin(rank: int, world: int, configs: list[PhaseConfig]) -> None:
    for config in configs:
        begin(config, Ranks(rank, world, torch.device("cpu")))


def _newest(work: Path, phase: str = "pseudo") -> str:
    found = CheckpointStore(work, UID).newest(phase)
    assert found is not None
    return str(found.checkpoints / found.manifest.name)


def _sample(folder: str) -> str:
    options = ["--prompt", PROMPT, "--tokens", str(COUNT), "--seed", "3"]
    ended = CliRunner().invoke(main, ["sample", folder, *options])
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def _expected(config: PhaseConfig) -> str:
    """Return the text of the model with the initial weights of the job's seed."""
    model = build_model(config.model, config.sharing, config.data.seed, torch.float32)
    written = generate(model, [*PROMPT.encode()], COUNT, config.model.sequence_length, Sampling(256, 0.8, 1.0, 3))
    return PROMPT + readable(bytes(written).decode(errors="replace")) + "\n"


def _cases() -> list[tuple[str, str]]:
    return [(model, layout) for model in MODELS for layout in (LAYOUTS if model == "plain" else OF_OTHERS)]


@pytest.fixture
def small(job_body: Any) -> Any:
    """Return the job in float32, the dtype in which `sample` computes."""
    job_body["spec"]["precision"] = {"compute": "float32"}
    job_body["spec"]["phases"][0]["sharing"] = {"blocks": 2}
    return job_body


def test_sample_writes_the_reference_text_for_any_layout_and_home(small: Any, config: Any) -> None:
    made: list[tuple[PhaseConfig, str]] = []
    for number, (model, layout) in enumerate(_cases()):
        fields = {"layers": 4, "hiddenSize": 16, "attention": {"heads": 2}, "sequenceLength": 16}
        small["spec"]["model"] = fields | {"feedForward": {"size": 32}} | MODELS[model]
        small["spec"]["phases"][0] |= LAYOUTS[layout]
        made.append((config(0, str(number)), f"{model}, {layout}"))
    for world in sorted({config.ranks for config, _ in made}):
        configs = [config for config, _ in made if config.ranks == world]
        if world == 1:
            _begin(0, 1, configs)
        else:
            run_ranks(_begin, world, world, configs)
    for config, name in made:
        assert _sample(_newest(Path(config.work_directory))) == _expected(config), name


def test_sample_reads_delinked_and_unshared_checkpoints(
    small: Any, config: Any, delink_of: Any, train: Any, tmp_path: Path
) -> None:
    """The text is unchanged by a delink, and by the materialized files of the delinked checkpoint."""
    small["spec"]["phases"][0]["until"] = {"step": 1}
    train(config(0))
    shared = _sample(_newest(tmp_path / "work"))
    delink(delink_of(1))
    linked = _newest(tmp_path / "work", "real")
    assert _sample(linked) == shared
    again = CliRunner().invoke(main, ["delink", linked, "--to", "copied", "--materialize"])
    assert again.exit_code == 0, again.output
    assert _sample(again.stdout.strip()) == shared
    train(config(1), stop=lambda: True)
    assert _sample(_newest(tmp_path / "work", "real")) != shared, "further training changes the text"


def test_sample_reads_a_checkpoint_in_object_storage(small: Any, config: Any, bucket: Bucket, tmp_path: Path) -> None:
    """The checkpoint was saved by two ranks."""
    small["spec"]["phases"][0] |= LAYOUTS["data 2, full, host"]
    run_ranks(_begin, 2, 2, [config(0)])
    folder = Path(_newest(tmp_path / "work"))
    for file in folder.iterdir():
        bucket.write(f"job/checkpoints/{folder.name}/{file.name}", file.read_bytes())
    assert _sample(f"{bucket.url}/job/checkpoints/{folder.name}") == _expected(config(0))
