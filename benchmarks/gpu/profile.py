"""Trace some steps of one case with torch's profiler: `python -m benchmarks.gpu.profile`."""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.cases import MICRO_BATCHES, Case, Point, suite
from benchmarks.gpu.machine import first_device
from benchmarks.gpu.stacks import trainer_of
from benchmarks.work import noisy_sequences

_WARM_UP, _STEPS, _ROWS = 3, 2, 25


def main() -> None:
    options = _options()
    models, device = suite(tiny=options.tiny).models, first_device(options.device)
    name = options.model or next(iter(models))
    tokens = options.tokens or (128 if options.tiny else 16384)
    point = Point(tokens=tokens, micro_batches=MICRO_BATCHES)
    case = Case(model=name, stack=options.stack, home=options.home, clipping=options.clipping, points=(point,))
    print(f"{case.label}, {tokens} tokens a step", flush=True)
    _write(case, tokens, options, device)


def _write(case: Case, tokens: int, options: argparse.Namespace, device: torch.device) -> None:
    model = suite(tiny=options.tiny).models[case.model]
    batches = noisy_sequences(_WARM_UP + _STEPS, tokens // model.sequence_length, model.sequence_length + 1, seed=7).to(
        device
    )
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        trainer = trainer_of(case, model, device, Path(folder))
        for batch in batches[:_WARM_UP]:
            trainer.train(batch, MICRO_BATCHES)
        trainer.settle()
        with profile(activities=activities) as profiler:
            for batch in batches[_WARM_UP:]:
                trainer.train(batch, MICRO_BATCHES)
            trainer.settle()
        trainer.close()
    profiler.export_chrome_trace(str(options.out))
    column = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(profiler.key_averages().table(sort_by=column, row_limit=_ROWS, max_name_column_width=60))
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB, for a viewer of Chrome traces")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="profile", description="A trace of some steps.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--model", help="1B or 4B; default: the smaller one")
    parser.add_argument("--stack", default="pseudoreal", choices=["pseudoreal", "fully_shard"])
    parser.add_argument("--home", default="Host", choices=["Device", "Host", "Disk"])
    parser.add_argument("--clipping", default="Global", choices=["Global", "PerUnit", "None"])
    parser.add_argument("--tokens", type=int, help="of a step; default 16384")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "."), "gpu-profile.json.gz"))
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU that it can use; --device cpu --tiny tries the program without one")
    return options


if __name__ == "__main__":
    main()
