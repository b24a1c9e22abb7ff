"""A layer of the model: attention, then an MLP or experts."""

from dataclasses import dataclass

from pseudoreal_api.spec.model import Model
from torch import Tensor, nn

from pseudoreal_trainer.model.attention import Attention, Documents, Scope
from pseudoreal_trainer.model.context import SequenceParts
from pseudoreal_trainer.model.experts import Experts, Router, RouterStatistics, Routes, RoutingDecision, SavedDecision
from pseudoreal_trainer.model.layers import FeedForward, rms_norm
from pseudoreal_trainer.model.recomputation import mark_recomputed
from pseudoreal_trainer.model.tensor import TensorRanks
from pseudoreal_trainer.model.top_k import TopKExperts


@dataclass(frozen=True)
class RoutedTokens:
    """Result of a layer's pass up to its experts."""

    hidden: Tensor
    """Residual stream, [B, T, H], to which the experts' output is added."""
    features: Tensor
    """Input of the experts, [N, H]. Each of a token's experts gets a copy of the token's row."""
    routes: Routes
    shared: Tensor | None
    """Output of shared experts, [B, T, H]; None without shared experts."""

    def add_expert_output(self, mixed: Tensor) -> Tensor:
        """Return the layer's output, [B, T, H]. `mixed`: output of the experts, [N, H]."""
        mixed = mixed.view_as(self.hidden)
        return self.hidden + (mixed if self.shared is None else mixed + self.shared)


class Block(nn.Module):
    """A transformer layer: adds attention, then the MLP or experts, to the residual stream. Each of the two parts has a
    pre-norm, a post-norm, or both, according to `norm.placement`."""

    def __init__(
        self,
        spec: Model,
        layer: int = 0,
        linear: type[nn.Linear] = nn.Linear,
        tensor_ranks: TensorRanks | None = None,
    ) -> None:
        """`layer`: any layer of the block's kind, dense or with experts; all layers of a kind may share the block.
        `linear`: class of the linear layers in attention, in the MLP and in shared experts. `tensor_ranks`: ranks with
        other slices of their matrices; None: this rank has whole matrices."""
        super().__init__()
        self.attention_norm, self.attention_output_norm = _pre_norm(spec), _post_norm(spec)
        self.attention = Attention(spec, linear, tensor_ranks)
        self.ffn_norm, self.ffn_output_norm = _pre_norm(spec), _post_norm(spec)
        self.is_mixture = spec.has_experts(layer)
        if self.is_mixture:
            self.router, self.experts, self.shared = _experts(spec, linear, tensor_ranks)
        else:
            self.ffn = FeedForward(spec.hidden_size, spec.feed_forward, linear, tensor_ranks)

    def forward(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        statistics: RouterStatistics | None = None,
        scope: Scope | None = None,
        saved: SavedDecision | None = None,
        *,
        is_output_read: bool = True,
    ) -> Tensor:
        """Return the block's output: [B, T, H] -> [B, T, H].

        `mask`, `scope`: as in `Attention.forward`. `statistics`: router statistics of a training pass with a graph;
        None without experts, and in passes without a graph. `saved`: holds the routing decision of an earlier pass, or
        receives the decision of this pass; None: the decision is not needed again. `is_output_read`: if false, the
        output serves only to compute gradients. Its values are then undefined, unless gradients depend on the last
        product, as with experts or with a post-norm of the MLP.
        """
        hidden = self._attend(hidden, rotation, mask, scope)
        if not (is_output_read or self.is_mixture or self.ffn_output_norm is not None):
            return self.ffn.unread_sum(hidden, _pre_normalize(self.ffn_norm, hidden))
        return hidden + _normalize(
            self.ffn_output_norm,
            self._feed_forward(_pre_normalize(self.ffn_norm, hidden), statistics, scope, saved),
        )

    def route(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        mask: Tensor | None = None,
        statistics: RouterStatistics | None = None,
        scope: Scope | None = None,
        decision: RoutingDecision | None = None,
    ) -> RoutedTokens:
        """Run `forward` up to the experts, for experts on other ranks. `decision`: routing decision of an earlier pass.
        The block must have no norm after the experts: the norm's backward pass would need the experts' outputs
        again."""
        assert self.ffn_output_norm is None, "the job's rules allow only norm.placement Pre with expert ranks or groups"
        hidden = self._attend(hidden, rotation, mask, scope)
        features = _pre_normalize(self.ffn_norm, hidden)
        routes = self.experts.routes(self.router(features), statistics, self._documents(scope), decision)
        shared = None if self.shared is None else self.shared(features)
        return RoutedTokens(hidden, features.flatten(0, 1), routes, shared)

    def _attend(
        self, hidden: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor | None, scope: Scope | None
    ) -> Tensor:
        # The attention output is not bound to a variable, so that its memory is freed right after the addition.
        return hidden + _normalize(
            self.attention_output_norm,
            self.attention(_pre_normalize(self.attention_norm, hidden), rotation, mask, scope),
        )

    def keys_and_values(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Return the keys and values of the block's attention for the block's input: [B, T, H] -> [B, T, 2 key heads,
        width]."""
        return self.attention.keys_and_values(_pre_normalize(self.attention_norm, hidden), rotation)

    def use_experts_of(self, other: "Block") -> None:
        """Make both blocks use the experts of `other`. Each block keeps its router."""
        self.experts.use_weights_of(other.experts)

    def _feed_forward(
        self,
        features: Tensor,
        statistics: RouterStatistics | None,
        scope: Scope | None,
        saved: SavedDecision | None,
    ) -> Tensor:
        out: Tensor = self._mix_experts(features, statistics, scope, saved) if self.is_mixture else self.ffn(features)
        return out

    def _mix_experts(
        self,
        features: Tensor,
        statistics: RouterStatistics | None = None,
        scope: Scope | None = None,
        saved: SavedDecision | None = None,
    ) -> Tensor:
        """Return the output of the experts: [B, T, H] -> [B, T, H]."""
        # Top-k experts have no capacity limit, so they take no documents.
        known = () if isinstance(self.experts, TopKExperts) else (self._documents(scope),)
        mixed: Tensor = self.experts(features, self.router(features), statistics, *known, saved=saved)
        return mixed if self.shared is None else mixed + self.shared(features)

    def _documents(self, scope: Scope | None) -> Documents | None:
        """Return the documents for the experts' capacity per document; None: the capacity is per sequence, or the
        experts have none."""
        if isinstance(scope, SequenceParts):
            assert isinstance(self.experts, TopKExperts), "the job's rules allow context ranks without capacities only"
            return None
        return scope


def _experts(
    spec: Model, linear: type[nn.Linear], tensor_ranks: TensorRanks | None
) -> tuple[Router, Experts | TopKExperts, FeedForward | None]:
    """Return the router, the experts, and the shared experts; None without shared experts."""
    assert spec.experts is not None, "the layer has experts"
    router = Router(spec.hidden_size, spec.experts.count)
    if spec.experts.top_k is None:
        return router, Experts(spec, spec.experts), None
    shared = FeedForward(spec.hidden_size, spec.shared_expert, linear, tensor_ranks) if spec.shared_expert else None
    return router, TopKExperts(spec, spec.experts.top_k, spec.experts.count), shared


def _pre_norm(spec: Model) -> nn.Module | None:
    return rms_norm(spec, spec.hidden_size) if spec.norm.placement != "Post" else None


def _post_norm(spec: Model) -> nn.Module | None:
    return rms_norm(spec, spec.hidden_size) if spec.norm.placement != "Pre" else None


def _pre_normalize(norm: nn.Module | None, hidden: Tensor) -> Tensor:
    """Return the input of attention, of the MLP or of the experts, [B, T, H]."""
    return hidden if norm is None else mark_recomputed(norm(hidden), norm, hidden)


def _normalize(norm: nn.Module | None, features: Tensor) -> Tensor:
    if norm is None:
        return features
    out: Tensor = norm(features)
    return out
