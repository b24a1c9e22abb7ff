"""Checkpoints of earlier releases are read, and training goes on from them. tests/data/checkpoints has some of each."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from click.testing import CliRunner
from numpy.typing import NDArray
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import delink_config, phase_config
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint import delink as delinking
from pseudoreal_trainer.checkpoint.manifest import FORMAT_VERSION, READABLE_VERSIONS
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore
from pseudoreal_trainer.cli.command import main
from pseudoreal_trainer.data.token_corpus import open_corpus
from pseudoreal_trainer.engine.ranks.ranks import Ranks
from pseudoreal_trainer.plan.units import KINDS, Kind
from pseudoreal_trainer.storage.path import storage_path
from pseudoreal_trainer.training.phase import train_phase
from safetensors.numpy import load_file

from tests.support.forked import run_ranks
from tests.unit.trainer.storage.support.object_server import Bucket, bucket, endpoint

__all__ = ["bucket", "endpoint"]

DATA = Path(__file__).parents[3] / "data" / "checkpoints"
RELEASES = {"0.3.0": 4}
"""Release -> version of the format of its checkpoints."""
JOBS = sorted(path.parent.relative_to(DATA).as_posix() for path in DATA.glob("*/*/job.json"))
CHECKPOINTS = sorted(path.parent.relative_to(DATA).as_posix() for path in DATA.glob("*/*/checkpoints/*/manifest.json"))
DENSE, SHARDED, PIPELINE = (f"0.3.0/{name}" for name in ("dense", "experts-sharded", "experts-pipeline"))
SHARDED_END, SHARDED_LINK = "pseudo-00000004", "real-00000004"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Kept:
    """A copy of a job's work directory, as its release left it."""

    work: Path
    release: str
    body: dict[str, Any]

    @property
    def uid(self) -> str:
        return str(json.loads((self.work / "job.json").read_text())["uid"])

    @property
    def store(self) -> CheckpointStore:
        return CheckpointStore(self.work, self.uid)

    @property
    def job(self) -> PseudoRealJob:
        body = self.body | {"metadata": self.body["metadata"] | {"uid": self.uid}}
        return PseudoRealJob.from_object(body)

    def config(self, index: int, execution: int = 2) -> PhaseConfig:
        return phase_config(
            self.job,
            index,
            execution=execution,
            work_directory=str(self.work),
            offload_directory=str(self.work / "offload"),
        )

    def reader(self, name: str) -> Reader:
        return self.store.reader(next(head for head in self.store.committed() if head.name == name))

    def edit(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the manifest of a checkpoint, in the order and with the indentation of the release."""
        path = self.work / "checkpoints" / name / "manifest.json"
        manifest = json.loads(path.read_text())
        change(manifest)
        path.write_text(json.dumps(manifest, indent=1))


@pytest.fixture
def kept(tmp_path: Path) -> Callable[[str], Kept]:
    def copy(job: str) -> Kept:
        work = tmp_path / "work"
        shutil.copytree(DATA / job, work)
        body = yaml.safe_load((work / "job.yaml").read_text())
        body["spec"]["data"]["path"] = str(DATA)
        return Kept(work, job.split("/")[0], body)

    return copy


def test_version_without_reader_and_kept_checkpoints_is_not_possible() -> None:
    """If FORMAT_VERSION grows: write a reader of the version before, keep checkpoints of it (tests/data/checkpoints/
    README.md), and add the release to RELEASES. Versions since release 0.3.0 stay readable."""
    kept = {json.loads((DATA / path / "manifest.json").read_text())["formatVersion"] for path in CHECKPOINTS}
    assert kept >= {*range(4, FORMAT_VERSION)}, "each version before this one has checkpoints in tests/data/checkpoints"
    assert [*READABLE_VERSIONS] == [*range(4, FORMAT_VERSION + 1)]
    assert {path.split("/")[0] for path in CHECKPOINTS} == {*RELEASES}


@pytest.mark.parametrize("path", CHECKPOINTS)
def test_every_tensor_is_what_the_files_hold(path: str, kept: Callable[[str], Kept]) -> None:
    job, name = path.split("/checkpoints/")
    found = kept(job)
    reader = found.reader(name)
    assert RELEASES[found.release] == reader.manifest.files_version
    found.store.verify(reader.manifest)
    for kind in KINDS:
        expected, whole = _independent(DATA / job / "checkpoints", name, kind), reader.whole(kind)
        assert whole.keys() == expected.keys()
        for tensor, array in expected.items():
            assert (whole[tensor].dtype, whole[tensor].shape) == (array.dtype, array.shape)
            assert whole[tensor].tobytes() == array.tobytes(), (tensor, kind)
            half = array.size // 2
            assert reader.read(tensor, kind, half, array.size).tobytes() == array.reshape(-1)[half:].tobytes()


def _independent(checkpoints: Path, name: str, kind: Kind) -> Arrays:
    """Return all tensors of version 4 under the names of version 5: as docs/checkpoint-format.md says, with a JSON
    parser and the safetensors library."""
    manifest = json.loads((checkpoints / name / "manifest.json").read_text())
    assert manifest["formatVersion"] == 4
    link = manifest.get("link") or {"folder": name, "blocks": [*range(99)]}
    stored = _single_tensors(manifest, checkpoints / link["folder"], kind)
    found: Arrays = {}
    for tensor, array in stored.items():
        if not tensor.startswith("blocks."):
            found[tensor] = array
            continue
        _, block, rest = tensor.split(".", 2)
        divisor = 1.0 if kind == "weights" or "firstMomentDivisor" not in link else link["firstMomentDivisor"]
        if kind == "second_moment" and "secondMomentDivisor" in link:
            divisor = link["secondMomentDivisors"].get(tensor, link["secondMomentDivisor"])
        for number, source in enumerate(link["blocks"]):
            if source == int(block):
                found[f"blocks.{number}.{rest}"] = array / divisor if divisor != 1 else array
    return _stacked(found)


def _single_tensors(manifest: dict[str, Any], folder: Path, kind: Kind) -> Arrays:
    stem, ending = ("weights", "") if kind == "weights" else ("moments", f".{kind}")
    found = {}
    for tensor, entry in manifest["tensors"].items():
        parts = [
            _file(folder / f"{stem}-{piece['file']:05d}.safetensors")[tensor + ending].reshape(-1)
            for piece in entry["pieces"]
        ]
        found[tensor] = np.concatenate(parts).reshape(entry["shape"])
    return found


@cache
def _file(path: Path) -> Arrays:
    return dict(load_file(path))


def _stacked(arrays: Arrays) -> Arrays:
    found: Arrays = {}
    experts: dict[str, dict[int, NDArray[Any]]] = {}
    for name, array in arrays.items():
        match = re.fullmatch(r"(blocks\.\d+\.experts)\.(\d+)\.(.*)", name)
        if match is None:
            found[name] = array
        else:
            experts.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = array
    return found | {name: np.stack([parts[n] for n in range(len(parts))]) for name, parts in experts.items()}


def _end(job: str) -> Arrays:
    """Return the weights that the release itself ended with."""
    folder = DATA / job / "end"
    return _stacked(_single_tensors(json.loads((folder / "manifest.json").read_text()), folder, "weights"))


def _assert_same_end(found: Arrays, job: str) -> None:
    expected = _end(job)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # Not to the bit: the release ran on another machine, and computed experts one by one.
        tolerance = 1e-13 if array.dtype == np.float64 else 1e-5
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance, err_msg=name)


def _train(rank: int, world: int, config: PhaseConfig) -> None:
    torch.set_num_threads(1)
    train_phase(config, open_corpus(config), Ranks(rank, world, torch.device("cpu")), lambda: False)


@pytest.mark.parametrize("job", [DENSE, SHARDED])
def test_job_goes_on_from_its_delinked_checkpoint(job: str, kept: Callable[[str], Kept]) -> None:
    found = kept(job)
    _train(0, 1, found.config(1))
    end = found.reader("real-00000008")
    assert (end.manifest.format_version, end.manifest.files_version) == (FORMAT_VERSION, None)
    assert end.manifest.execution == 2
    _assert_same_end(end.whole(), job)


@pytest.mark.parametrize("world", [1, 4])
def test_job_goes_on_in_the_middle_of_a_phase(world: int, kept: Callable[[str], Kept]) -> None:
    """On the four ranks that saved the checkpoint, and on one."""
    found = kept(PIPELINE)
    if world == 1:
        phase = found.body["spec"]["phases"][0]
        del phase["workers"], phase["parallelism"]
    config = found.config(0)
    assert config.ranks == world
    run_ranks(_train, world, world, config) if world > 1 else _train(0, 1, config)
    _assert_same_end(found.reader("pseudo-00000006").whole(), PIPELINE)


def test_local_run_is_resumed(kept: Callable[[str], Kept], tmp_path: Path) -> None:
    found = kept(DENSE)
    record = found.work / "job.json"
    record.write_text(record.read_text().replace('"/corpus"', json.dumps(str(DATA))))
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(found.body))
    done = CliRunner().invoke(main, ["run", str(file), "--workdir", str(found.work), "--resume"])
    assert done.exit_code == 0, done.output
    assert "resumed from real-00000004" in done.output
    _assert_same_end(found.reader("real-00000008").whole(), DENSE)


@pytest.mark.parametrize("job", [DENSE, SHARDED])
def test_delink_of_an_old_checkpoint_reads_as_the_release_delinked_it(job: str, kept: Callable[[str], Kept]) -> None:
    found = kept(job)
    before = {kind: found.reader(SHARDED_LINK).whole(kind) for kind in KINDS}
    shutil.rmtree(found.work / "checkpoints" / SHARDED_LINK)
    config = delink_config(found.job, 1, execution=2, work_directory=str(found.work))
    delinking.delink(config)
    text = (found.work / "checkpoints" / SHARDED_LINK / "manifest.json").read_text()
    assert json.loads(text)["formatVersion"] == FORMAT_VERSION
    assert json.loads(text)["filesVersion"] == 4
    after = found.reader(SHARDED_LINK)
    assert after.manifest.link is not None
    assert after.manifest.link.folder == SHARDED_END
    _assert_same_arrays(before, after)
    _train(0, 1, found.config(1))
    _assert_same_end(found.reader("real-00000008").whole(), job)


def _assert_same_arrays(expected: dict[Kind, Arrays], found: Reader) -> None:
    for kind, arrays in expected.items():
        whole = found.whole(kind)
        assert whole.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_allclose(whole[name], array, rtol=1e-15, atol=0, err_msg=f"{name} {kind}")


def test_delink_of_a_delinked_old_checkpoint_sets_moments_to_zero(kept: Callable[[str], Kept]) -> None:
    """Also where second moments have divisors of their own, one for each expert."""
    found = kept(SHARDED)
    source = found.reader(SHARDED_LINK).manifest
    source = source.revised(sharing={"blocks": 2}, link=found.reader(SHARDED_LINK).manifest.link)
    again = delinking.delinked(source, "more", delinking.Target(found.config(1).sharing), "Reset")
    reader = Reader(again, found.store.folder)
    moments = [array for kind in KINDS[1:] for name, array in reader.whole(kind).items() if name.startswith("blocks.")]
    assert moments
    assert not any(array.any() for array in moments)


def test_checkpoint_that_is_saved_again_without_a_step_keeps_the_old_files(kept: Callable[[str], Kept]) -> None:
    """Its phase now ends where it was saved."""
    found = kept(PIPELINE)
    before = {kind: found.reader("pseudo-00000003").whole(kind) for kind in KINDS}
    phase = found.body["spec"]["phases"][0]
    del phase["workers"], phase["parallelism"]
    phase["until"] = {"step": 3}
    _train(0, 1, found.config(0))
    after = found.reader("pseudo-00000003")
    assert (after.manifest.phase_complete, after.manifest.execution) == (True, 2)
    assert json.loads((found.work / "checkpoints/pseudo-00000003/manifest.json").read_text())["formatVersion"] == 5
    _assert_same_arrays(before, after)


def _invoke(*arguments: str) -> str:
    done = CliRunner().invoke(main, [*arguments])
    assert done.exit_code == 0, done.output
    return str(done.output)


@pytest.mark.parametrize("name", [SHARDED_END, SHARDED_LINK])
def test_commands_take_old_checkpoints(name: str, kept: Callable[[str], Kept], tmp_path: Path) -> None:
    found = kept(SHARDED)
    folder = found.work / "checkpoints" / name
    assert "4 files" in _invoke("verify", str(folder))
    expected = found.reader(name).whole()
    description = json.loads(_invoke("inspect", str(folder), "--json"))
    assert description["verified"]
    assert description["parameters"] == sum(array.size for array in expected.values())
    _invoke("export", str(folder), "--format", "safetensors", "--output", str(tmp_path / "exported"))
    exported = load_file(next((tmp_path / "exported").glob("*.safetensors")))
    assert exported.keys() == expected.keys()
    assert all(np.array_equal(exported[tensor], array) for tensor, array in expected.items())
    assert len(_invoke("sample", str(folder), "--tokens", "3")) > 0


def test_materialized_delink_has_plain_files_of_this_version(kept: Callable[[str], Kept]) -> None:
    found = kept(SHARDED)
    expected = {kind: found.reader(SHARDED_LINK).whole(kind) for kind in KINDS}
    found.edit(SHARDED_END, lambda manifest: manifest["updates"].update(leftOut={"blocks.1": 1}))
    folder = found.work / "checkpoints"
    _invoke("delink", str(folder / SHARDED_END), "--to", "plain", "--optimizer-state", "Measured", "--materialize")
    shutil.rmtree(folder / SHARDED_END)
    shutil.rmtree(folder / SHARDED_LINK)
    plain = found.reader("plain-00000004")
    assert plain.manifest.files_version is None
    found.store.verify(plain.manifest)
    assert load_file(folder / "plain-00000004" / "weights-00000.safetensors").keys() == expected["weights"].keys()
    _assert_same_arrays(expected, plain)
    assert plain.updates("blocks.3.experts.up.weight") == 3, "the experts of 0.3 were a part of their block"
    assert plain.updates("blocks.2.experts.up.weight") == 4


def test_old_checkpoints_are_read_from_object_storage(kept: Callable[[str], Kept], bucket: Bucket) -> None:
    found = kept(SHARDED)
    for path in sorted((found.work / "checkpoints").rglob("*.*")):
        key = f"prefix/job/checkpoints/{path.parent.name}/{path.name}"
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=path.read_bytes())
    store = CheckpointStore(storage_path(f"{bucket.url}/job"), found.uid)
    assert [head.name for head in store.committed()] == [SHARDED_END, SHARDED_LINK]
    newest = store.newest("real")
    assert newest is not None
    _assert_same_arrays({kind: found.reader(SHARDED_LINK).whole(kind) for kind in KINDS}, newest)


def test_old_checkpoints_are_pruned_and_linked_ones_are_kept(kept: Callable[[str], Kept]) -> None:
    found = kept(SHARDED)
    found.body["spec"]["checkpoint"] = {"everySteps": 1, "keepLast": 1}
    _train(0, 1, found.config(1))
    assert sorted(found.store.names()) == [SHARDED_END, SHARDED_LINK, "real-00000007", "real-00000008"]


def test_flipped_bit_in_an_old_file_is_found(kept: Callable[[str], Kept], capsys: pytest.CaptureFixture[str]) -> None:
    found = kept(PIPELINE)
    path = found.work / "checkpoints" / "pseudo-00000003" / "moments-00002.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RuntimeError, match="every checkpoint of phase pseudo"):
        found.store.newest("pseudo")
    assert "moments-00002.safetensors" in capsys.readouterr().out


UP = "blocks.0.experts.{}.up.weight"
MISTAKES: dict[str, Callable[[dict[str, Any]], object]] = {
    "an expert is missing": lambda m: m["tensors"].pop(UP.format(2)),
    "an expert too many": lambda m: m["tensors"].update({UP.format(4): m["tensors"][UP.format(3)]}),
    "a number far away": lambda m: m["tensors"].update({UP.format(999_999_999): m["tensors"].pop(UP.format(3))}),
    "more experts than fit": lambda m: m["model"]["experts"].update(count=10**18),
    "no number of experts": lambda m: m["model"].pop("experts"),
    "another shape": lambda m: m["tensors"][UP.format(1)].update(shape=[4, 6]),
    "no shape": lambda m: m["tensors"][UP.format(0)].pop("shape"),
    "a shape of words": lambda m: m["tensors"][UP.format(0)].update(shape=["a"]),
    "another dtype": lambda m: m["tensors"][UP.format(1)].update(dtype="float32"),
    "no object": lambda m: m["tensors"].update({UP.format(0): None}),
    "no pieces": lambda m: m["tensors"][UP.format(1)].update(pieces=[]),
    "pieces of another type": lambda m: m["tensors"][UP.format(1)].update(pieces=3),
    "a gap": lambda m: m["tensors"][UP.format(0)]["pieces"][0].update(begin=1),
    "an end that is too early": lambda m: m["tensors"][UP.format(0)]["pieces"][-1].update(end=3),
    "an end that is a word": lambda m: m["tensors"][UP.format(0)]["pieces"][-1].update(end="24"),
    "no file": lambda m: m["tensors"][UP.format(0)]["pieces"][-1].pop("file"),
    "a folder elsewhere": lambda m: m.update(link={"folder": "../../other", "blocks": [0, 0]}),
    "a file elsewhere": lambda m: m["files"].update({"../x": {"sha256": "", "size": 1}}),
    "a measurement without an expert": lambda m: m["measurement"]["single"].pop(UP.format(2)),
    "a measurement of words": lambda m: m["measurement"].update(shared={"blocks.0.ffn_norm.weight": "much"}),
    "a measurement that is a list": lambda m: m.update(measurement=[1]),
    "more divisors than fit": lambda m: (
        m["model"]["experts"].update(count=1_000_000),
        m.update(link={"folder": SHARDED_END, "blocks": [0], "firstMomentDivisor": 1, "secondMomentDivisor": 1}),
        m["link"].update(secondMomentDivisors={f"blocks.{n}.experts.0.up.weight": 2 for n in range(1000)}),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_manifest_that_makes_no_sense_counts_as_not_committed(
    mistake: str, kept: Callable[[str], Kept], capsys: pytest.CaptureFixture[str]
) -> None:
    found = kept(SHARDED)
    assert found.store.newest("pseudo") is not None
    found.edit(SHARDED_END, MISTAKES[mistake])
    store = found.store
    if store.committed("pseudo"):  # the head alone is in order: the mistake is in the tensors or files
        with pytest.raises(RuntimeError, match="every checkpoint of phase pseudo"):
            store.newest("pseudo")
    else:
        assert store.newest("pseudo") is None
    assert "manifest_unreadable" in capsys.readouterr().out


def test_divisors_of_experts_that_were_not_measured_are_the_usual_ones(kept: Callable[[str], Kept]) -> None:
    found = kept(SHARDED)
    found.edit(SHARDED_LINK, lambda manifest: manifest["link"]["secondMomentDivisors"].pop(UP.format(2)))
    reader = found.reader(SHARDED_LINK)
    stored = _independent(found.work / "checkpoints", SHARDED_LINK, "second_moment")["blocks.2.experts.up.weight"]
    assert np.array_equal(reader.tensor("blocks.2.experts.up.weight", "second_moment"), stored)
