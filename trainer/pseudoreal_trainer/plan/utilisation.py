"""Model FLOPs utilisation: the share of a device's peak used by a training step. Pure.

The operations of a step are counted as in Megatron-LM: for each token, two for each matrix weight that it is multiplied
by; attention to the preceding half of the tokens (only the tokens in a window, and only in the same document if
documents are masked); the backward pass as twice the forward pass; nothing for recomputation. Others count attention to
all tokens (torchtitan, nanoGPT): at long sequences their shares are larger by a tenth.
"""

from collections.abc import Mapping, Sequence

from pseudoreal_trainer.plan.sizes import Sizes

_PEAKS: Sequence[tuple[str, float]] = (
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H800", 989e12),
    ("H200", 989e12),
    ("H20", 148e12),
    ("B200", 2250e12),
    ("A100", 312e12),
    ("A800", 312e12),
    ("L40S", 362e12),
)
"""Part of a device's name -> dense bfloat16 operations per second, from the vendor's data sheets. The first part that
is found in the name counts."""


def step_operations(sizes: Sizes, tokens: int, twice_the_pairs: Mapping[int | None, int] | None = None) -> int:
    """Return the model's floating-point operations for a training step on `tokens` tokens. `twice_the_pairs`: as in
    `Sizes.block_flops`, by the window of a layer; None: tokens attend in whole sequences."""
    model, pairs = sizes.model, twice_the_pairs
    head = 2 * tokens * model.vocabulary_size * model.hidden_size
    layers = [
        sizes.block_flops(tokens, layer, None if pairs is None else pairs[model.window_of(layer)])
        for layer in range(model.layers)
    ]
    return 3 * (sum(layers) + head)


def peak_operations(device: str) -> float | None:
    """Return the bfloat16 operations per second of the device with this name; None if unknown."""
    return next((peak for part, peak in _PEAKS if part in device), None)
