"""Code that decides loads no client of Kubernetes: a decision is a function of the observation."""

import subprocess
import sys
from pathlib import Path

import pseudoreal_operator

PACKAGE = Path(pseudoreal_operator.__file__).parent
EFFECTS = {"observe.fetch"}
PURE = {"observe", "status", "failures", "manifests", "lifecycle"}
REPORT = "print(*sorted({'kopf', 'aiohttp', 'kubernetes', 'torch'} & set(sys.modules)))"


def test_pure_modules_load_no_kubernetes_client() -> None:
    files = [file.relative_to(PACKAGE) for room in PURE for file in (PACKAGE / room).glob("*.py")]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert modules > PURE | EFFECTS
    imports = [f"import pseudoreal_operator.{module}" for module in sorted(modules - EFFECTS)]
    program = "\n".join(["import sys", *imports, REPORT])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
