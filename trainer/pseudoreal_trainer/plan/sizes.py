"""How large things are: units and what a micro-batch leaves behind. Pure."""

from dataclasses import dataclass

from pseudoreal_api.model_spec import Model

from pseudoreal_trainer.plan.units import Unit

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4, "float64": 8}
_NORM_BYTES = 4
"""The norms compute in float32 at least, and so does attention keep its log-sum-exp."""


@dataclass(frozen=True)
class Sizes:
    """Everything besides the layout that bytes depend on."""

    model: Model
    units: tuple[Unit, ...]
    compute_bytes: int
    """Of an element in the forward and backward pass."""
    master_bytes: int
    """Of an element of a master weight, a moment or a gradient."""
    micro_batch: int
    """Sequences of a micro-batch, over all data ranks."""

    def rows(self, data_rank: int, data_ranks: int) -> int:
        """Sequences of a micro-batch on a data rank; as `stream.rank_parts` splits them."""
        return self.micro_batch * (data_rank + 1) // data_ranks - self.micro_batch * data_rank // data_ranks

    def most_rows(self, data_ranks: int) -> int:
        return -(-self.micro_batch // data_ranks)

    def boundary(self, rows: int) -> int:
        """Bytes of what passes from layer to layer, [rows, T, H]."""
        return rows * self.model.sequence * self.model.hidden * self.compute_bytes

    def block_graph(self, rows: int) -> int:
        """Bytes that autograd keeps of a block's forward pass, without its input and its weights."""
        model, c = self.model, self.compute_bytes
        norm = max(_NORM_BYTES, c)
        matrices = 4 if model.ffn.activation == "swiglu" else 2
        # Of each norm its input in its own type (the block's input serves, where that is the same type), the inverse
        # of the root, the normalized features before and after the weight.
        norms = 2 * (norm + (norm + c) * model.hidden) + (1 + (c < norm)) * norm * model.hidden
        # Query, key, value, the mixed values, and those once more with the heads side by side.
        attention = 5 * c * model.hidden + norm * model.heads
        return rows * model.sequence * (norms + attention + matrices * c * model.ffn.hidden)


def compute_bytes(compute: str) -> int:
    return _COMPUTE_BYTES[compute]


def master_bytes(compute: str) -> int:
    """Masters are float32, or float64 with float64."""
    return max(4, _COMPUTE_BYTES[compute])
