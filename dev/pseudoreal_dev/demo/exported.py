"""Loads an exported model as its users do: with transformers, without code of this project."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_dev.machine.errors import DevError

_SAMPLE_TOKENS = 60
_WINDOWS_AT_ONCE = 16


@dataclass(frozen=True)
class Judgement:
    loss: float
    """Mean cross-entropy on the validation set, in nats per token."""
    sample: str
    """Generated continuation of the prompt."""


def judge(export: Path, validation: Path, prompt: str) -> Judgement:
    """Load the export and measure it on token files. Raises DevError if weights are missing or unexpected."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = AutoModelForCausalLM.from_pretrained(export, output_loading_info=True)
    model, found = loaded
    wrong = {what: names for what, names in found.items() if names}
    if wrong:
        raise DevError(f"transformers does not find in {export} what its model has: {wrong}")
    tokenizer: Any = AutoTokenizer.from_pretrained(export)
    torch.manual_seed(0)
    with torch.no_grad():
        loss = _loss(model, _windows(validation, model.config.max_position_embeddings))
        asked = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        tokens = model.generate(**asked, max_new_tokens=_SAMPLE_TOKENS, do_sample=True, temperature=0.8, pad_token_id=0)
    return Judgement(loss, tokenizer.decode(tokens[0, asked["input_ids"].shape[1] :], skip_special_tokens=True))


def _windows(folder: Path, sequence: int) -> Any:
    """Return all windows of native token files, [W, T + 1]: the last column is the target of the last input."""
    import torch

    index = json.loads((folder / "index.json").read_text())
    data = b"".join((folder / f"{shard['name']}.bin").read_bytes() for shard in index["shards"])
    tokens = torch.frombuffer(bytearray(data), dtype=getattr(torch, index["dtype"])).to(torch.int64)
    return tokens.unfold(0, sequence + 1, sequence)


def _loss(model: Any, windows: Any) -> float:
    """Return the mean cross-entropy of the model on windows [W, T + 1], in nats per token."""
    from torch.nn import functional as F

    total = 0.0
    for part in windows.split(_WINDOWS_AT_ONCE):
        logits = model(part[:, :-1]).logits.double()  # [B, T, V]
        total += F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    targets: int = windows[:, 1:].numel()
    return total / targets
