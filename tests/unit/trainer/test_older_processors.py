"""Tests of bits run once more for each older set of vector instructions that this machine can imitate.

They are marked `processor`: another processor may round differently.
"""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from pseudoreal_dev.machine import paths

from tests.support.depth import DEPTH

ONEDNN_LEVEL = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
"""ATEN_CPU_CAPABILITY -> ONEDNN_MAX_CPU_ISA of the same processors, from the oldest."""


def _processor_flags() -> set[str]:
    """Return the processor's flags; none where the kernel has no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return next(({*line.partition(":")[2].split()} for line in lines if line.startswith("flags")), set())


def _levels(flags: set[str], is_deep: bool) -> list[tuple[str, str]]:
    """Return pairs of ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA below the machine's own.

    torch does not check whether the processor supports ATEN_CPU_CAPABILITY, so no level above the machine's own is
    requested. With `is_deep`, all combinations with oneDNN's levels are returned, including the machine's own; "" is
    oneDNN's own choice.
    """
    levels = [level for level, flag in (("default", "avx2"), ("avx2", "avx512f")) if flag in flags]
    if not is_deep or not levels:
        return [(level, ONEDNN_LEVEL[level]) for level in levels]
    every = [*levels, "avx512" if "avx512f" in flags else "avx2"]
    onednn = ["", *(ONEDNN_LEVEL[level] for level in every), *(["AVX512_CORE_BF16"] * ("avx512_bf16" in flags))]
    return [*product(every, onednn)]


@pytest.mark.parametrize(
    ("aten", "onednn"),
    [
        pytest.param(*pair, marks=pytest.mark.xdist_group("-".join(pair)))
        for pair in _levels(_processor_flags(), DEPTH.is_deep)
    ],
)
def test_bits_are_the_same_with_older_vector_instructions(aten: str, onednn: str) -> None:
    marks = "processor or processor_deep" if DEPTH.is_deep else "processor"
    options = ["--deep", f"--seed={DEPTH.seed}"] if DEPTH.is_deep else []
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, *options, "tests/unit/trainer"],
        cwd=paths.REPOSITORY,
        env=os.environ | {"ATEN_CPU_CAPABILITY": aten} | ({"ONEDNN_MAX_CPU_ISA": onednn} if onednn else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
