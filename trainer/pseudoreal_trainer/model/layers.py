"""Parts of a layer: the norm and the MLP."""

from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from pseudoreal_api.spec.model import Model
from torch import Tensor, nn
from torch.nn import functional as F


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
        intermediate = F.gelu(self.up(hidden)) if self.gate is None else F.silu(self.gate(hidden)) * self.up(hidden)
        out: Tensor = self.down(intermediate)
        return out
