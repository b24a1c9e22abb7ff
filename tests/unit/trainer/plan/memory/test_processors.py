"""The planned bytes are right for processors with fewer instructions, which oneDNN is told to use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
DEPENDENT = [
    FOLDER / "test_autograd_memory.py",
    f"{FOLDER / 'test_against_engine.py'}::test_predicted_peak_equals_the_allocators_in_a_step",
]
INSTRUCTIONS = Path("/proc/cpuinfo")
LONG = [pytest.param(isa, marks=pytest.mark.long) for isa in ("AVX512_CORE", "AVX512_CORE_BF16")]


@pytest.mark.parametrize("isa", ["AVX2", *LONG])
def test_predicted_bytes_do_not_depend_on_the_processors_instructions(isa: str) -> None:
    """The same tests run with all instructions in their own files. Only bfloat16 products have kernels that depend on
    them."""
    if isa == "AVX2" and not (INSTRUCTIONS.exists() and "avx512f" in INSTRUCTIONS.read_text()):
        pytest.skip("this processor has no later instructions than AVX2, so the tests have run like this already")
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": isa, "ATEN_CPU_CAPABILITY": isa.split("_")[0].lower()}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--quiet",
        "-p",
        "no:cacheprovider",
        "-k",
        "bfloat16",
        *map(str, DEPENDENT),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout
