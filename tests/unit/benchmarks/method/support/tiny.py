"""Chains of some steps on random tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.method.arms import TINY, Scale, Study, parameters
from benchmarks.method.training import Place
from tests.unit.trainer.data.support.written import write_native

_SEQUENCE, _SEQUENCES = 16, 4


def scale_of_steps(study: Study, steps: int) -> Scale:
    """Return a scale whose full budget at width 16 is so many steps."""
    return replace(
        TINY,
        tokens_per_parameter=steps * _SEQUENCE * _SEQUENCES / parameters(study, 16),
        sequence=_SEQUENCE,
        sequences=_SEQUENCES,
        micro_batches=1,
        precision="float32",
        vocabulary=128,
    )


def random_texts(folder: Path) -> Place:
    random = np.random.default_rng(3)
    for name, tokens in (("train", 2000), ("validation", 500)):
        write_native(folder / "texts" / "text" / name, [random.integers(1, 100, tokens)], vocabulary=128)
    return Place(folder / "scratch", folder / "texts")
