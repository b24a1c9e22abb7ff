"""Train mixtures for their losses, and write the section of docs/benchmarks/mixtures.md on their losses.

Earlier results are replaced: all times must be from one run.
"""

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import UTC, datetime
from pathlib import Path

from pseudoreal_api.resolved.resolve import delink_config
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.checkpoint.delink import delink

from benchmarks import pages
from benchmarks.machine import commit
from benchmarks.moe.experiments import EXPERIMENTS, SEEDS, Experiment, job
from benchmarks.moe.lives import CORPUS, Life, live_phase, quiet
from benchmarks.moe.report import LIVES, section

_AT_A_TIME = 2


def main() -> None:
    quiet()
    LIVES.parent.mkdir(exist_ok=True)
    waiting = [(experiment, seed) for seed in SEEDS for experiment in EXPERIMENTS]
    lives = []
    with tempfile.TemporaryDirectory(dir=LIVES.parent) as folder, ThreadPoolExecutor(_AT_A_TIME) as pool:
        running = [
            pool.submit(_live, experiment, seed, Path(folder) / str(index))
            for index, (experiment, seed) in enumerate(waiting)
        ]
        for count, done in enumerate(as_completed(running), start=1):
            life = done.result()
            lives.append(life)
            loss = life.final_loss
            progress.note(f"{count} of {len(running)}: seed {life.seed}: {life.experiment} ({loss:.3f})")
    LIVES.write_text("".join(life.model_dump_json() + "\n" for life in lives))
    pages.put_section(pages.MIXTURES, section(lives))


def _live(experiment: Experiment, seed: int, work: Path) -> Life:
    body, phases = job(experiment, seed, str(CORPUS)), []
    for index in range(len(body.spec.phases)):
        if index:
            delink(delink_config(body, index, execution=1, work_directory=str(work)))
        phases.append(live_phase(body, index, work))
    shutil.rmtree(work)
    today = datetime.now(UTC).date().isoformat()
    return Life(experiment=experiment.name, seed=seed, phases=phases, date=today, commit=commit())
