"""transformers' own code in float64.

transformers casts norms, positions, routers and softmaxes to float32 for models of every dtype. Comparisons in float64
would therefore differ by float32 rounding. Here float64 takes the place of float32 in the source of its modules, which
are executed again.
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
    """Return this module of transformers, executed again with float64 in place of float32."""
    module = importlib.import_module(f"transformers.{name}")
    assert module.__file__ is not None, "modules of transformers are loaded from files"
    text = Path(module.__file__).read_text()
    text = re.sub(r"torch\.float32\b|torch\.float\b", "torch.float64", text).replace(".float()", ".double()")
    before = getattr(module, _FREQUENCIES, {})
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    # Modules imported earlier hold the dictionary itself and compute frequencies with its entries, so update it in
    # place.
    before |= getattr(module, _FREQUENCIES, {})
    return module


def causal_model(module: str, stem: str, config: dict[str, Any]) -> nn.Module:
    """Return a transformers model in float64 with this configuration."""
    import transformers

    widened("modeling_rope_utils")
    classes = widened(f"models.{module}.modeling_{module}")
    made = getattr(transformers, f"{stem}Config")(**config)
    model: nn.Module = getattr(classes, f"{stem}ForCausalLM")(made)
    return model.to(torch.float64).eval()
