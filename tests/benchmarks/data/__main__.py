"""`make bench-data`: preparation of text. Writes benchmark-results/data.json."""

import tempfile
from pathlib import Path
from statistics import median

from pseudoreal_dev.machine.progress import progress

from tests.benchmarks import machine
from tests.benchmarks.data.preparing import measure
from tests.benchmarks.results import RESULTS

DATA = RESULTS / "data.json"


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="bench-data-") as folder:
        found = measure(Path(folder))
    DATA.parent.mkdir(parents=True, exist_ok=True)
    DATA.write_text(found.model_dump_json(indent=1) + "\n")
    machine.stamp(DATA)
    rates = [found.text_bytes / median(seconds) / 1e6 for seconds in (found.alone_seconds, found.prepare_seconds)]
    progress.note(f"tokenizers alone {rates[0]:.2f} MB/s, prepare {rates[1]:.2f} MB/s: {found.share:.1%}")


if __name__ == "__main__":
    main()
