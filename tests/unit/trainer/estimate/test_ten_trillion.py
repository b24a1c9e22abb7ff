"""The M6-10T examples are planned in seconds, match closed forms, and fit.

The closed forms are for the model of arXiv 2110.03888: 48 layers of 10,240 experts with 2 x 1024 x 9984 parameters
each, in 80 prototypes, on 512 ranks.
"""

import json
import time
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_trainer.checkpoint.heads import read_manifest
from pseudoreal_trainer.checkpoint.manifest import FILES, FileDigest, Manifest, Random, StoredTensor
from pseudoreal_trainer.checkpoint.manifest_text import manifest_text
from pseudoreal_trainer.checkpoint.pieces import tensors_of
from pseudoreal_trainer.cli.job_file import parse_job
from pseudoreal_trainer.cli.plan_command import plan
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.plan.memory.from_config import fixed_layout, phase_sizes
from pseudoreal_trainer.plan.units import units_of

from tests.support.cpu_time import seconds, slowness

EXAMPLES = Path(__file__).parents[4] / "examples"
LAYERS, HIDDEN, EXPERTS, PROTOTYPES, RANKS = 48, 1024, 10_240, 80, 512
EXPERT = 2 * HIDDEN * 9984
GB = 10**9
MOST_MANIFEST_BYTES = 8 << 20
MOST_SECONDS = 10.0
"""Limit of processor seconds for each of the two phases of a file."""


@cache
def _planned(job: str, hardware: str) -> tuple[dict[str, Any], dict[str, Any]]:
    arguments = [str(EXAMPLES / job), "--hardware", str(EXAMPLES / "hardware" / hardware), "--json"]
    begin = time.process_time()
    result = CliRunner().invoke(plan, arguments)
    assert time.process_time() - begin < slowness() * 2 * MOST_SECONDS
    assert result.exit_code == 0, result.output
    pseudo, real = json.loads(result.stdout)["phases"]
    return pseudo, real


def _exchanged(tokens: int, expert_ranks: int, micro_batches: int) -> int:
    """Return the bytes that a rank sends in a step with `tokens` tokens of its own: five bfloat16 rows per choice, two
    of them with a weight, and the token counts of each layer."""
    rows = LAYERS * tokens * PROTOTYPES * (5 * HIDDEN + 2) * 2
    counts = LAYERS * micro_batches * EXPERTS * 8
    return (rows + counts) * (expert_ranks - 1) // expert_ranks


@pytest.mark.parametrize(
    ("job", "hardware", "tokens", "pseudo_ranks", "micro_batches"),
    [("m6-10t.yaml", "v100.yaml", 4096, 128, 8), ("m6-10t-h200.yaml", "h200.yaml", 16384, 64, 16)],
)
def test_ten_trillion_parameters_fit(
    job: str, hardware: str, tokens: int, pseudo_ranks: int, micro_batches: int
) -> None:
    pseudo, real = _planned(job, hardware)
    assert real["parameters"] == pytest.approx(LAYERS * EXPERTS * EXPERT, rel=1e-3)
    assert real["parameters_per_rank"] == pytest.approx(LAYERS * EXPERTS // RANKS * EXPERT, rel=1e-3)
    assert pseudo["parameters_per_rank"] == pytest.approx(EXPERTS * EXPERT / RANKS, rel=1e-2)
    for phase, ranks in ((pseudo, pseudo_ranks), (real, RANKS)):
        assert phase["fits"], phase["reasons"]
        found = phase["bytes_moved_per_step"]["experts"]
        assert found == pytest.approx(_exchanged(tokens, ranks, micro_batches), rel=1e-6)
    assert pseudo["bytes"]["disk"] == 0
    # Master weights and moments take 12 bytes; units away from the device also keep a bfloat16 copy.
    away = real["bytes"]["host"] + real["bytes"]["disk"]
    assert away > 14 * real["parameters_per_rank"] - real["bytes"]["device"]


def test_on_v100_the_experts_of_the_real_phase_need_the_disk_and_on_h200_they_do_not() -> None:
    _, real = _planned("m6-10t.yaml", "v100.yaml")
    assert real["bytes"]["disk"] > 100 * GB
    _, real = _planned("m6-10t-h200.yaml", "h200.yaml")
    assert real["bytes"]["disk"] == 0
    assert real["bytes"]["host"] > 100 * GB


def test_schedule_estimate_says_what_must_change() -> None:
    """One phase only, to keep the test short."""
    arguments = [str(EXAMPLES / "m6-10t.yaml"), "--phase", "pseudo", "--hardware", str(EXAMPLES / "hardware/v100.yaml")]
    said = CliRunner().invoke(plan, [*arguments, "--days", "7"]).stdout
    assert "let phase pseudo have" in said
    assert "the exchanges of tokens with experts" in said


@pytest.mark.solo
def test_the_manifest_is_small_and_loads_in_a_tenth_of_a_second(tmp_path: Path) -> None:
    """The manifest of the real phase as saved by 512 ranks; no tensor files are written, and the digests are
    placeholders."""
    job = parse_job(EXAMPLES / "m6-10t.yaml")
    config = phase_config(job, 1, execution=1, work_directory=".", offload_directory=".")
    layout, units = fixed_layout(config, phase_sizes(config, "accelerator")), units_of(config.model, config.sharing)
    tensors = tensors_of(layout, units, "float32")
    assert len([name for name in tensors if ".experts." in name]) == 2 * LAYERS
    for name, tensor in tensors.items():
        pairs = [(piece.begin, piece.end) for piece in tensor.pieces]
        covered = [begin for begin, _ in pairs] + [prod(tensor.shape)]
        assert covered == [0, *(end for _, end in pairs)], f"{name} is covered in order, each element once"
    files = {name.format(rank): FileDigest(sha256="0" * 64, size=1) for name in FILES for rank in range(RANKS)}
    path = tmp_path / "manifest.json"
    path.write_text(manifest_text(_manifest(config, tensors, files)))
    assert path.stat().st_size < MOST_MANIFEST_BYTES
    assert seconds(lambda: read_manifest(tmp_path), 3) < 0.1 * slowness()
    found = read_manifest(tmp_path)
    assert found is not None
    assert found.tensors == tensors


def _manifest(config: PhaseConfig, tensors: dict[str, StoredTensor], files: dict[str, FileDigest]) -> Manifest:
    return Manifest(
        job=config.job,
        execution=1,
        phase=config.phase,
        phase_index=1,
        model=config.model,
        sharing=config.sharing,
        random=Random(seed=1),
        corpus=CorpusIdentity(files=1, size=1, sha256="0" * 64),
        step=1,
        tokens=1,
        global_cursor=1,
        phase_complete=False,
        delinked=False,
        tensors=tensors,
        files=files,
    )
