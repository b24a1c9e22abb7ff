"""Parts of a layer: the norm and the MLP."""

from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F

from pseudoreal_trainer.model.recomputation import mark_recomputed


def rms_norm(spec: Model, size: int) -> nn.RMSNorm:
    """Return a root-mean-square norm over `size` features (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    return nn.RMSNorm(size, eps=float(spec.norm.epsilon))


class FeedForward(nn.Module):
    """MLP. GELU: down(gelu(up(x))). SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(self, hidden: int, spec: FeedForwardSpec) -> None:
        super().__init__()
        bias = spec.bias == "All"
        self.gate = nn.Linear(hidden, spec.size, bias=bias) if spec.activation == "SwiGLU" else None
        self.up = nn.Linear(hidden, spec.size, bias=bias)
        self.down = nn.Linear(spec.size, hidden, bias=bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the MLP's output: [..., H] -> [..., H]."""
        gate = None if self.gate is None else self.gate(hidden)
        out: Tensor = self.down(activate(gate, self.up(hidden)))
        return out


def activate(gate: Tensor | None, up: Tensor) -> Tensor:
    """Return the input of an MLP's last product, gelu(up) or silu(gate) * up: [..., F] -> [..., F]. Selective
    recomputation keeps only `gate` and `up`."""
    if gate is None:
        return mark_recomputed(F.gelu(up), F.gelu, up)
    activated = mark_recomputed(F.silu(gate), F.silu, gate)
    return mark_recomputed(activated * up, _gated, gate, up)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up
