"""The feed-forward part of a layer; with experts, each of them."""

from pseudoreal_api.spec.model import FeedForward as FeedForwardSpec
from torch import Tensor, nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    """gelu: down(gelu(up(x))). swiglu: down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants")."""

    def __init__(self, hidden: int, spec: FeedForwardSpec) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, spec.hidden, bias=False) if spec.activation == "swiglu" else None
        self.up = nn.Linear(hidden, spec.hidden, bias=False)
        self.down = nn.Linear(spec.hidden, hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """The layer's output: [..., H] -> [..., H]."""
        inner = F.gelu(self.up(hidden)) if self.gate is None else F.silu(self.gate(hidden)) * self.up(hidden)
        out: Tensor = self.down(inner)
        return out
