"""charts/pseudoreal-llama on a cluster: tokenize text, train on two workers, load the model with transformers.

The program checks the result of each part.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pseudoreal_api.names import work_folder
from pseudoreal_api.status.status import PseudoRealJobStatus

from pseudoreal_dev.demo import exported, report
from pseudoreal_dev.demo.child_job import wait_until_complete
from pseudoreal_dev.demo.files import copied
from pseudoreal_dev.demo.target import NAMESPACE, Target
from pseudoreal_dev.demo.training import show, train, wait_until_gone
from pseudoreal_dev.demo.volumes import create_host_volume
from pseudoreal_dev.machine import paths
from pseudoreal_dev.machine.errors import DevError
from pseudoreal_dev.machine.progress import progress

CHART = paths.REPOSITORY / "charts" / "pseudoreal-llama"
JOB = "llama"
"""Name of the Helm release and of the job."""
CLAIMS = {"data": f"{JOB}-data", "checkpoints": f"{JOB}-checkpoints"}
PREPARE_SECONDS = EXPORT_SECONDS = 1800.0
PROMPT = "And it came to pass"

Line = dict[str, Any]
"""A line of metrics.jsonl."""


def run(target: Target) -> None:
    """Run the demo. Raises DevError if a part fails, or a result is not as expected."""
    kubernetes = target.kubernetes
    _install(target)
    progress.say(wait_until_complete(kubernetes, f"{JOB}-prepare", PREPARE_SECONDS))
    status = train(kubernetes, JOB)
    progress.say(wait_until_complete(kubernetes, f"{JOB}-export", EXPORT_SECONDS))
    show(kubernetes, JOB)
    progress.console.print(report.losses(status.phases, "token"))
    with progress.step("copying the export from its claim"):
        folder = _copied(target)
    with progress.step("loading the export with transformers"):
        found = exported.judge(folder / "export", folder / "validation", PROMPT)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    progress.say("\n".join(sentences(status, _last_bits_per_byte(lines), found.loss)))
    progress.say("\nWhat it wrote while it was trained:\n\n" + "\n".join(_written(lines)))
    progress.say(f"\nA sample of what it writes, in transformers:\n\n{PROMPT}{found.sample}\n")
    progress.say(f"{folder / 'export'}:")
    for file in sorted((folder / "export").iterdir()):
        progress.say(f"  {file.stat().st_size:>12,} {file.name}")


def _install(target: Target) -> None:
    """Install the example from scratch; the remains of an earlier run are deleted first."""
    kubernetes, here = target.kubernetes, f"--namespace={NAMESPACE}"
    with progress.step(f"removing what an earlier {JOB} left"):
        kubernetes.run_helm("uninstall", JOB, here, "--ignore-not-found", "--wait", "--timeout=10m")
        wait_until_gone(kubernetes, JOB)
    with progress.step(f"helm install {JOB} {CHART.relative_to(paths.REPOSITORY)}"):
        if target.needs_host_volume:
            for claim in CLAIMS.values():
                create_host_volume(kubernetes, claim, "2Gi")
        kubernetes.run_helm("install", JOB, str(CHART), here, f"--set-string=image={target.trainer_image}")


def _copied(target: Target) -> Path:
    """Copy the export, the validation set and the metrics to this machine; return the folder."""
    job = target.kubernetes.find("prj", JOB, f"--namespace={NAMESPACE}")
    assert job, "the job exists: `train` has followed it to its success"
    work = work_folder(JOB, job["metadata"]["uid"])
    wanted = ["data/export", "data/validation", f"checkpoints/{work}/metrics.jsonl"]
    folder = paths.REPOSITORY / "pseudoreal-runs" / "demo" / JOB
    copied(target.kubernetes, target.trainer_image, CLAIMS, wanted, folder)
    return folder


def _last_bits_per_byte(lines: Sequence[Line]) -> float:
    """Return the newest bits per byte of the only validation set."""
    (bits,) = [line["bits_per_byte"] for line in lines if line["bits_per_byte"]][-1].values()
    return float(bits)


def _written(lines: Sequence[Line]) -> list[str]:
    """Return a line for each validation: step, first prompt, and the continuation of that prompt."""
    samples = [(line["step"], line["samples"][0]) for line in lines if line["samples"]]
    return [f"step {step:>4}  {each['prompt']}{each['text']}".replace("\n", " ") for step, each in samples]


def sentences(status: PseudoRealJobStatus, bits: float, exported_loss: float) -> list[str]:
    """Return sentences about the results. Raises DevError if a result is not as expected."""
    ends = (status.phases[0].start_validation_loss, status.phases[-1].validation_loss)
    first, last = (float(loss or "nan") for loss in ends)
    delinked = report.delinks(status.phases)
    _require(last < first, f"the validation loss did not fall: {first} at first, {last} at last")
    _require(all(before == after for before, after in delinked), f"a delink changed the loss: {delinked}")
    # The status has four decimals, and transformers sums in another order.
    _require(abs(exported_loss - last) < 1e-3, f"the export's loss is {exported_loss:.4f}, the status says {last}")
    return [
        f"validation loss {last:.4f} nats per token, {bits:.3f} bits per byte; it began with {first:.4f}",
        *report.delink_sentences(delinked),
        f"transformers finds {exported_loss:.4f} with the exported model, on the same tokens",
    ]


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DevError(otherwise)
