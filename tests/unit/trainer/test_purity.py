"""What needs no torch loads none: a pod's first program, its last word, the plan and the commands are there at once."""

import subprocess
import sys
from pathlib import Path

import pseudoreal_trainer

PACKAGE = Path(pseudoreal_trainer.__file__).parent
ROOMS = {"plan", "estimate", "runtime", "storage", "data", "checkpoint", "report", "ui", "cli"}
NEEDS_TORCH = PACKAGE / "runtime" / "rendezvous"


def test_what_needs_no_torch_loads_none() -> None:
    found = [file for room in ROOMS for file in (PACKAGE / room).rglob("*.py")]
    files = [file.relative_to(PACKAGE) for file in found if not file.is_relative_to(NEEDS_TORCH)]
    modules = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    assert modules > ROOMS
    imports = [f"import pseudoreal_trainer.{module}" for module in sorted(modules)]
    program = "\n".join(["import sys", *imports, "print('torch' in sys.modules)"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_ends_of_a_model_load_no_compiler() -> None:
    """It would take longer than torch itself, at each start and restart of a rank."""
    program = """
import sys
import torch
from pseudoreal_api.spec.model import Model
from pseudoreal_trainer.model.head import embedding_and_head
sizes = {"layers": 2, "hiddenSize": 8, "sequenceLength": 8, "attention": {"heads": 2}, "feedForward": {"size": 8}}
with torch.device("meta"):
    embedding_and_head(Model.model_validate(sizes))
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n", done.stderr
