"""transformers' own code in float64.

It casts norms, positions, routers and softmaxes to float32, whatever the type of the model is: in float64 it differs
from an exact computation by 1e-6. Here its text is changed where it says float32, so that nothing of it is written
anew.
"""

import importlib
import re
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

_FREQUENCIES = "ROPE_INIT_FUNCTIONS"


@cache
def widened(name: str) -> ModuleType:
    """The module of transformers with this name, in which every float32 is a float64."""
    module = importlib.import_module(f"transformers.{name}")
    assert module.__file__ is not None, "it is a file"
    text = Path(module.__file__).read_text()
    text = re.sub(r"torch\.float32\b|torch\.float\b", "torch.float64", text).replace(".float()", ".double()")
    before = getattr(module, _FREQUENCIES, {})
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    # Modules that were imported before hold the dictionary itself, and make frequencies anew with it.
    before |= getattr(module, _FREQUENCIES, {})
    return module


def causal_model(module: str, stem: str, config: dict[str, Any]) -> nn.Module:
    """A model of transformers, in float64, with this configuration."""
    import transformers

    widened("modeling_rope_utils")
    classes = widened(f"models.{module}.modeling_{module}")
    made = getattr(transformers, f"{stem}Config")(**config)
    model: nn.Module = getattr(classes, f"{stem}ForCausalLM")(made)
    return model.to(torch.float64).eval()
