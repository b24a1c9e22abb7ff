"""Write checkpoints of a release. Run by the Python of the release's own environment, as README.md says."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
TEXT = "text.txt"
KEPT = {
    "dense": ["pseudo-00000004", "real-00000004"],
    "experts-sharded": ["pseudo-00000004", "real-00000004"],
    "experts-pipeline": ["pseudo-00000003"],
}
"""Job -> checkpoints to keep. The weights at the end of the job are kept, too."""


def _job(name: str, phases: list[dict[str, Any]], **spec: Any) -> dict[str, Any]:
    model = {
        "layers": 4,
        "hiddenSize": 4,
        "attention": {"heads": 1},
        "sequenceLength": 8,
        "feedForward": {"size": 6},
        **spec.pop("model", {}),
    }
    return {
        "apiVersion": "pseudoreal.dev/v1alpha1",
        "kind": "PseudoRealJob",
        "metadata": {"name": name},
        "spec": {
            "model": model,
            "data": {"path": ".", "pattern": TEXT, "validation": {"fraction": "0.1", "everySteps": 3}},
            "optimizer": {"learningRate": "0.01", "warmupSteps": 3},
            "precision": {"compute": "float64"},
            "phases": phases,
            "checkpoint": {"everySteps": 3, "keepLast": 9},
            **spec,
        },
    }


def jobs() -> list[dict[str, Any]]:
    batch = {"sequences": 8, "microBatches": 2}
    experts = {"experts": {"count": 4, "prototypes": 2, "capacityFactor": "1.25"}}
    real = {"name": "real", "until": {"step": 8}, "batch": batch}
    sharded = {"name": "pseudo", "sharing": {"blocks": 2}, "until": {"step": 4}, "workers": 2, "batch": batch}
    pipeline = {"pipeline": 2, "schedule": "1F1B", "stateSharding": "Optimizer"}
    return [
        _job(
            "dense",
            [{"name": "pseudo", "sharing": {"blocks": 1}, "until": {"step": 4}, "batch": batch}, real],
            precision={"compute": "float32"},
        ),
        _job(
            "experts-sharded",
            [sharded | {"parallelism": {"stateSharding": "Full"}}, real],
            model=experts | {"feedForward": {"size": 6, "activation": "SwiGLU"}},
            delink={"optimizerState": "Measured", "measuredSteps": 3},
        ),
        _job(
            "experts-pipeline",
            [
                {"name": "pseudo", "sharing": {"blocks": 2}, "until": {"step": 6}, "batch": batch}
                | {"workers": 4, "parallelism": pipeline}
            ],
            model=experts,
        ),
    ]


def _write(job: dict[str, Any], release: str, scratch: Path) -> None:
    name, phases = job["metadata"]["name"], job["spec"]["phases"]
    target, work = HERE / release / name, scratch / name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    (target / "job.yaml").write_text(yaml.safe_dump(job, sort_keys=False))
    file = shutil.copy(target / "job.yaml", scratch / f"{name}.yaml")
    shutil.copy(HERE / TEXT, scratch / TEXT)
    program = "from pseudoreal_trainer.cli.command import main; main()"
    subprocess.run([sys.executable, "-c", program, "run", str(file), "--workdir", str(work)], check=True)
    for checkpoint in KEPT[name]:
        shutil.copytree(work / "checkpoints" / checkpoint, target / "checkpoints" / checkpoint)
    for file_name in ("execution", "lineage.json"):
        shutil.copy(work / file_name, target / file_name)
    # A local run writes the path of the text in full.
    (target / "job.json").write_text((work / "job.json").read_text().replace(str(scratch), "/corpus"))
    last = work / "checkpoints" / f"{phases[-1]['name']}-{phases[-1]['until']['step']:08d}"
    (target / "end").mkdir()
    for path in (last / "manifest.json", *last.glob("weights-*.safetensors")):
        shutil.copy(path, target / "end")
    print(json.dumps({"job": name, "bytes": sum(path.stat().st_size for path in target.rglob("*") if path.is_file())}))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for body in jobs():
            _write(body, sys.argv[1], Path(folder))
