"""Muon for the matrices of blocks beside torch's AdamW for all other tensors, written from the papers' definition.

`python -m pytest tests/unit/trainer/engine/state/test_muon.py` compares the definition with torch.optim.Muon.
"""

import re
from collections.abc import Iterable

import torch
from pseudoreal_api.spec.optimizer import Optimizer
from torch import Tensor, nn

from tests.support.adamw import adamw_of_tensors
from tests.support.tensor_groups import figures_of

_MATRICES = re.compile(r"\.(attention\.(query|key|value|output)|(ffn|experts|shared)\.(gate|up|down))\.weight$")


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U p(S) V^T of the singular value decomposition, with the quintic polynomial p applied five times."""
    u, singular, v = torch.linalg.svd(matrix / matrix.norm().clamp(min=1e-7), full_matrices=False)
    for _ in range(5):
        singular = 3.4445 * singular - 4.7750 * singular**3 + 2.0315 * singular**5
    found: Tensor = u @ singular.diag_embed() @ v
    return found


class MuonAndAdamW(torch.optim.Optimizer):
    """One step updates all tensors. The momentum of a matrix is `exp_avg` of its state."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], spec: Optimizer, rate: float) -> None:
        named = list(parameters)
        super().__init__([parameter for _, parameter in named], {})
        self._spec, self._rate = spec, rate
        self._matrices = [(name, p) for name, p in named if _MATRICES.search(name)]
        self._others = adamw_of_tensors([(n, p) for n, p in named if not _MATRICES.search(n)], spec, rate)
        self.state = self._others.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        self._others.step()
        for name, parameter in self._matrices:
            rate, decay = figures_of(name, self._spec)
            state, gradient = self.state[parameter], parameter.grad
            assert gradient is not None
            before = state.get("exp_avg", torch.zeros_like(parameter))
            state["exp_avg"] = 0.95 * before + 0.05 * gradient
            direction = 0.95 * state["exp_avg"] + 0.05 * gradient
            rows, columns = parameter.shape[-2:]
            stacked = direction.view(-1, rows, columns)
            change = torch.stack([orthogonalized(one) for one in stacked]).view_as(parameter)
            scale = 0.2 * max(rows, columns) ** 0.5
            parameter.copy_(parameter * (1 - self._rate * rate * decay) - self._rate * rate * scale * change)
