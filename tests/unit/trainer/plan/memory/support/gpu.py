"""Allocations of a GPU, simulated on the CPU by fused operations, with every tensor counted.

On a GPU, a norm and an attention are one operation each. Here they are custom operations, whose results do not matter:
the tensors that autograd saves for them and that their backward passes create are as on a GPU. `fake_cuda` verifies
this: under it torch itself tells which tensors it would save on a CUDA device.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pseudoreal_trainer.model import attention
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import custom_op
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_attention = F.scaled_dot_product_attention


@custom_op("pseudoreal_tests::norm", mutates_args=())
def _norm(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = features.to(torch.promote_types(features.dtype, torch.float32))
    root = (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    return (wide * root).to(features.dtype) * weight, root


@custom_op("pseudoreal_tests::norm_backward", mutates_args=())
def _norm_backward(features: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(features), torch.zeros_like(weight)


@custom_op("pseudoreal_tests::attention", mutates_args=())
def _fused_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Flash attention returns its output in the layout of the query. The efficient kernel returns the heads side by
    side, and log-sum-exps padded to blocks of 32 tokens."""
    mixed, (rows, heads, length, _) = _attention(query, key, value, is_causal=True), query.shape
    if query.dtype == torch.bfloat16:
        return torch.empty_like(query).copy_(mixed), torch.zeros(rows, heads, length)
    return mixed.transpose(1, 2).contiguous().transpose(1, 2), torch.zeros(rows, heads, -(-length // 32) * 32)


@custom_op("pseudoreal_tests::varlen_attention", mutates_args=())
def _varlen_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    """Flash attention with variable lengths: queries [tokens, heads, w] -> the same, and log-sum-exps [heads,
    tokens]."""
    return torch.zeros_like(query), torch.zeros(query.shape[1], query.shape[0])


@custom_op("pseudoreal_tests::attention_backward", mutates_args=())
def _attention_backward(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)


def _keep_norm(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _keep_attention(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)


_norm.register_autograd(lambda ctx, _, __: _norm_backward(*ctx.saved_tensors[:2]), setup_context=_keep_norm)
_fused_attention.register_autograd(
    lambda ctx, _, __: _attention_backward(*ctx.saved_tensors[:3]), setup_context=_keep_attention
)
_varlen_attention.register_autograd(
    lambda ctx, _, __: _attention_backward(*ctx.saved_tensors[:3]), setup_context=_keep_attention
)


@contextmanager
def operations_of_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "rms_norm", lambda features, _, weight, eps: _norm(features, weight)[0])  # noqa: ARG005
        patch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **_: _fused_attention(q, k, v)[0])
        patch.setattr(varlen, "varlen_attn", lambda q, k, v, *_, **__: _varlen_attention(q, k, v)[0])
        patch.setattr(attention, "varlen_obstacle", obstacle_of_a_gpu)
        yield


def obstacle_of_a_gpu(_: object, dtype: torch.dtype, *__: object) -> str | None:
    """Return what `attention.varlen_obstacle` returns for heads of a multiple of 8 features on a GPU with flash
    attention."""
    return None if dtype == torch.bfloat16 else "flash attention takes bfloat16"


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Within the context, tensors have no memory and pretend to be on a GPU. torch chooses an attention kernel by
    querying the GPU, so the patch chooses one here."""

    def attend(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool, **_: Any) -> Tensor:
        if query.dtype == torch.bfloat16:
            out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal)[0]
        else:
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            out = efficient(query, key, value, None, True, 0.0, is_causal)[0]
        return out

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=True), torch.device("cuda"):
        patch.setattr(F, "scaled_dot_product_attention", attend)
        patch.setattr(attention, "varlen_obstacle", obstacle_of_a_gpu)
        yield


def storage_of(tensor: Tensor) -> int:
    """Return a key that identifies the tensor's storage; it also works for fake tensors, which have no address."""
    return int(tensor.untyped_storage()._cdata)


class _Counter(TorchDispatchMode):
    """Count the bytes of new tensors; the tensors in `known` are not counted."""

    def __init__(self, known: list[Tensor], allocated: Callable[[int], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {storage_of(tensor) for tensor in known}
        self._allocated = allocated
        self._held = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(storage_of(tensor), tensor.untyped_storage())
        return out

    def _count(self, key: int, storage: torch.UntypedStorage) -> None:
        if key not in self._known:
            size = self._allocated(storage.nbytes())
            self._known.add(key)
            self._change(size)
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._change(-size)

    def _change(self, size: int) -> None:
        self._held += size
        self.most = max(self.most, self._held)


def most_tensor_bytes(act: Callable[[], object], known: list[Tensor], allocated: Callable[[int], int]) -> int:
    """Return the peak bytes of tensors during `act`, without `known`; a tensor of `size` bytes takes
    `allocated(size)`."""
    with _Counter(known, allocated) as counter:
        act()
    return int(counter.most)
