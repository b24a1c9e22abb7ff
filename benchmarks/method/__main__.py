"""Train all experiments and write docs/method.md: `python -m benchmarks.method`.

Earlier results with the same settings are kept, because training everything takes about an hour. Remove
docs/data/method.jsonl to train from scratch.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from pseudoreal_dev.machine.progress import progress

from benchmarks.method.experiments import EXPERIMENTS, SEEDS, Experiment
from benchmarks.method.lives import Life, live_family, quiet
from benchmarks.method.report import write_report
from benchmarks.results import RESULTS, SCRATCH

LIVES = RESULTS / "method.jsonl"
_AT_A_TIME = 2


def main() -> None:
    quiet()
    LIVES.parent.mkdir(exist_ok=True)
    known = _known()
    waiting = [
        (family, seed)
        for seed in SEEDS
        for family in _families()
        if seed in family[0].seeds and not known >= {(experiment.name, seed) for experiment in family}
    ]
    waiting.sort(key=lambda life: life[0][0].regime)
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as folder, ThreadPoolExecutor(_AT_A_TIME) as pool:
        running = [
            pool.submit(live_family, family, seed, Path(folder) / str(index))
            for index, (family, seed) in enumerate(waiting)
        ]
        for count, done in enumerate(as_completed(running), start=1):
            with LIVES.open("a") as file:
                file.writelines(life.model_dump_json() + "\n" for life in done.result())
            names = ", ".join(f"{life.experiment} ({life.phases[-1].points[-1].loss:.3f})" for life in done.result())
            progress.note(f"{count} of {len(running)}: seed {done.result()[0].seed}: {names}")
    write_report([Life.model_validate_json(line) for line in LIVES.read_text().splitlines()])


def _known() -> set[tuple[str, int]]:
    if not LIVES.exists():
        return set()
    lives = [Life.model_validate_json(line) for line in LIVES.read_text().splitlines()]
    return {(life.experiment, life.seed) for life in lives}


def _families() -> list[list[Experiment]]:
    """Return the experiments grouped by common pseudo phase; an experiment without one is alone."""
    families: dict[object, list[Experiment]] = {}
    for experiment in EXPERIMENTS:
        families.setdefault(experiment.pseudo or experiment, []).append(experiment)
    return list(families.values())


if __name__ == "__main__":
    main()
