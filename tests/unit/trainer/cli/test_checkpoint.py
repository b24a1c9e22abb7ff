"""`pseudoreal inspect`, `verify`, `delink` and `prune`."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.plan.units import KINDS

from tests.unit.trainer.checkpoint.support.by_hand import committed

UID = "11111111-2222"


@pytest.fixture
def work(job_body: Any, config: Any, train: Any, tmp_path: Path) -> Path:
    """Return the folder of a run that saved after steps 2, 4 and 6; the phase ends at 6."""
    job_body["spec"]["checkpoint"]["everySteps"] = 2
    train(config(0))
    return tmp_path / "work"


def _checkpoint(work: Path, name: str = "pseudo-00000006") -> str:
    return str(work / "checkpoints" / name)


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments))


def _flip(work: Path, name: str) -> None:
    path = Path(_checkpoint(work, name), "moments-00000.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_inspect_has_stable_keys(work: Path) -> None:
    found = json.loads(_invoke("inspect", _checkpoint(work), "--json").stdout)
    block = 4 * 16 * 16 + 2 * 16 * 32 + 2 * 16
    parameters = 2 * 256 * 16 + 16 + block
    size = sum(path.stat().st_size for path in Path(_checkpoint(work)).glob("*.safetensors"))
    assert found == {
        "step": 6,
        "tokens": 6 * 6 * 16,
        "phase": "pseudo",
        "blocks": 1,
        "sets_of_experts": 0,
        "layers": 4,
        "parameters": parameters,
        "bytes": size,
        "files": 2,
        "parent": "pseudo-00000004",
        "verified": True,
        "optimizer_state": None,
    }
    assert size > 3 * 8 * parameters
    assert "verified         True" in _invoke("inspect", _checkpoint(work)).stdout


def test_verify_names_the_file_and_the_last_good_checkpoint(work: Path) -> None:
    assert _invoke("verify", _checkpoint(work)).exit_code == 0
    _flip(work, "pseudo-00000006")
    ended = _invoke("verify", _checkpoint(work))
    assert ended.exit_code == 1
    assert "pseudo-00000006/moments-00000.safetensors has the SHA-256" in ended.stderr
    assert "the last good checkpoint of this phase is pseudo-00000004" in ended.stderr
    assert json.loads(_invoke("inspect", _checkpoint(work), "--json").stdout)["verified"] is False
    for name in ("pseudo-00000004", "pseudo-00000002"):
        _flip(work, name)
    assert "no other checkpoint of this phase is sound" in _invoke("verify", _checkpoint(work)).stderr


@pytest.mark.parametrize("materialize", [[], ["--materialize"]])
def test_delink_gives_layers_their_own_blocks_with_and_without_copied_files(work: Path, materialize: list[str]) -> None:
    ended = _invoke("delink", _checkpoint(work), "--to", "real", "--blocks", "2", *materialize)
    assert ended.exit_code == 0, ended.output
    assert ended.stdout.strip() == _checkpoint(work, "real-00000006")
    assert len(list(Path(_checkpoint(work, "real-00000006")).iterdir())) == (3 if materialize else 1)
    store = CheckpointStore(work, UID)
    found, source = store.newest("real"), store.newest("pseudo")
    assert found is not None
    assert source is not None
    for divisor, kind in zip((1, 2, 4), KINDS, strict=True):
        for block in (0, 1):
            expected = source.tensor("blocks.0.attention.query.weight", kind) / divisor
            assert found.tensor(f"blocks.{block}.attention.query.weight", kind).tobytes() == expected.tobytes()
        assert found.tensor("head.weight", kind).tobytes() == source.tensor("head.weight", kind).tobytes()


def test_delink_of_wrong_blocks_or_a_corrupt_checkpoint_is_an_error(work: Path) -> None:
    ended = _invoke("delink", _checkpoint(work), "--to", "real", "--blocks", "3")
    assert ended.exit_code == 78
    assert "sharing.blocks 3 must divide model.layers 4" in ended.stderr
    _flip(work, "pseudo-00000006")
    ended = _invoke("delink", _checkpoint(work), "--to", "real")
    assert ended.exit_code == 1
    assert "has the SHA-256" in ended.stderr
    assert not Path(_checkpoint(work, "real-00000006")).exists()


@pytest.mark.parametrize("arguments", [["--to", "pseudo", "--blocks", "1"], ["--to", "real"]])
def test_a_checkpoint_is_never_replaced_by_a_delink(work: Path, arguments: list[str]) -> None:
    """Two cases: a checkpoint with the name of its own source, whose files it would refer to, and a second delink."""
    _invoke("delink", _checkpoint(work), "--to", "real")
    before = {path: path.read_bytes() for path in (work / "checkpoints").glob("*/*")}
    ended = _invoke("delink", _checkpoint(work), *arguments)
    assert ended.exit_code == 78
    assert "exists, and is not replaced" in ended.stderr
    assert {path: path.read_bytes() for path in (work / "checkpoints").glob("*/*")} == before


def test_delink_rejects_a_path_as_name_of_a_phase(work: Path) -> None:
    assert "is no name of a phase" in _invoke("delink", _checkpoint(work), "--to", "../real").stderr


def test_prune_dry_run_names_the_checkpoints_that_prune_removes(work: Path) -> None:
    arguments = ("prune", str(work), "--keep-last", "1")
    assert _invoke(*arguments, "--dry-run").stdout == "would remove pseudo-00000002\n"
    assert Path(_checkpoint(work, "pseudo-00000002")).exists()
    assert _invoke(*arguments).stdout == "removed pseudo-00000002\n"
    assert [m.step for m in CheckpointStore(work, UID).committed()] == [4, 6]


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry"])
def test_prune_of_a_folder_with_two_jobs_says_what_to_do(dry: list[str], tmp_path: Path) -> None:
    for step, uid in enumerate(("u1", "u2", "u1", "u2", "u1"), 1):
        committed(CheckpointStore(tmp_path, None), step, uid=uid)
    before = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    ended = _invoke("prune", str(tmp_path), "--keep-last", "1", *dry)
    assert (ended.exit_code, ended.stdout) == (78, "")
    assert ended.stderr == (
        f"{tmp_path / 'checkpoints'} has checkpoints of 2 jobs: tiny (uid u1), tiny (uid u2); nothing is removed; move"
        " those of each job into a work directory of its own, and prune that\n"
    )
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == before


def test_prune_of_a_folder_without_checkpoints_removes_nothing(tmp_path: Path) -> None:
    ended = _invoke("prune", str(tmp_path), "--keep-last", "1")
    assert (ended.exit_code, ended.output) == (0, "")


def test_a_folder_without_a_manifest_is_a_usage_error(tmp_path: Path) -> None:
    for command in ("inspect", "verify"):
        ended = _invoke(command, str(tmp_path))
        assert ended.exit_code == 2
        assert "holds no readable manifest.json" in ended.stderr


def test_a_renamed_checkpoint_is_verified_and_its_name_in_the_manifest_is_said(work: Path) -> None:
    folder = Path(_checkpoint(work))
    renamed = folder.rename(folder.with_name("put-aside"))
    sound = _invoke("verify", str(renamed))
    assert sound.exit_code == 0, sound.output
    assert "put-aside: " in sound.stdout
    assert f"the folder's name differs from the manifest's, {folder.name}: " in sound.stdout
    _flip(work, "put-aside")
    assert _invoke("verify", str(renamed)).exit_code == 1
