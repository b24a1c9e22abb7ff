"""Speed of the file of units on disk, by the number of requests in flight: `python -m benchmarks.disk FOLDER`.

Reads and writes a file of 1 GiB in FOLDER, by chunks of 64 MiB and requests of 1 MiB, as updates do. Prints the median
speed, and the processor seconds for each GB.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

from pseudoreal_trainer.engine.state import direct_file
from pseudoreal_trainer.engine.state.direct_file import DirectFile, aligned_buffer

_FILE, _CHUNK, _ROUNDS = 1 << 30, 64 << 20, 3
_DEPTHS = (1, 2, 4, 8, 16, 32)


def _measured(work: Callable[[], None]) -> tuple[float, float]:
    """Return the bytes a second of the call, and its processor seconds for each byte."""
    seconds, of_processor = list[float](), list[float]()
    for _ in range(_ROUNDS + 1):
        begin, begin_of_processor = time.perf_counter(), time.process_time()
        work()
        seconds.append(time.perf_counter() - begin)
        of_processor.append(time.process_time() - begin_of_processor)
    return _FILE / median(seconds[1:]), median(of_processor[1:]) / _FILE


def main(folder: Path) -> None:
    chunk = aligned_buffer(_CHUNK)
    chunk.random_(0, 255)
    for depth in _DEPTHS:
        # A file starts its threads for this number of requests.
        direct_file.DEPTH = depth
        file = DirectFile(folder, _FILE)
        for name, act in (("write", file.write), ("read", file.read)):

            def work(act: Callable[..., None] = act) -> None:
                for offset in range(0, _FILE, _CHUNK):
                    act([(offset, chunk)])

            speed, of_processor = _measured(work)
            print(f"{depth} requests, {name}: {speed / 1e9:.2f} GB/s, {of_processor * 1e9:.2f} s of a core for a GB")
        file.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
