"""Passes of single modules, for comparing their bytes with the memory plan."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from pseudoreal_trainer.model.attention import Documents, find_documents, window_mask
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.experts import RouterStatistics
from pseudoreal_trainer.model.head import Embedding, Head, logit_soft_cap
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.model.rotary import rotary, rotation_at
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
from pseudoreal_trainer.plan.sizes import Device
from torch import Tensor, nn

from tests.unit.trainer.plan.support.cases import make_sizes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
MASTERS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}
ON_GPUS = ["float32", "bfloat16"]
Shape = tuple[int, int, int, int]
"""(hidden size, MLP size, sequences, tokens per sequence)."""


def graphs(
    shape: Shape,
    compute: str,
    activation: str,
    experts: dict[str, Any] | None = None,
    device: Device = "cpu",
    *,
    is_selective: bool = False,
    **options: Any,
) -> AutogradMemory:
    """Return the planned bytes of a block whose experts are never full. `options` are further fields of the model."""
    hidden, inner, rows, length = shape
    feed_forward, room = {"size": inner, "activation": activation}, {"capacityFactor": "100"}
    mixture = None if experts is None else experts | room
    model: dict[str, Any] = {
        "hiddenSize": hidden,
        "attention": {"heads": 4} | options.pop("attention", {}),
        "sequenceLength": length,
        "feedForward": feed_forward | options.pop("feedForward", {}),
        "experts": mixture,
    } | options
    sizes = make_sizes(1, compute=compute, device=device, **model)
    return AutogradMemory(sizes, rows * length, is_selective=is_selective)


@contextmanager
def made_in(compute: str) -> Iterator[None]:
    """Within the context, new tensors have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[compute])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class BlockPass:
    """A block, its input, the gradient of its output, and the gradient accumulators."""

    def __init__(self, found: AutogradMemory, compute: str, documents: Documents | None = None) -> None:
        """`documents`: the result of `documents_of`, which reads tokens and so is called without fake tensors; None:
        it is called here."""
        spec = found.sizes.model
        torch.manual_seed(0)
        with made_in(compute):
            self.block = Block(spec)
            self.source = torch.randn(
                found.tokens // spec.sequence_length, spec.sequence_length, spec.hidden_size
            )  # [B, T, H]
            self.gradient = torch.randn_like(self.source)
        self.rotation = rotary(spec, spec.sequence_length, self.source)
        window = spec.window_of(0)
        self.mask = None if window is None else window_mask(spec.sequence_length, window, self.source)
        self.documents = documents or documents_of(found)
        self.trained = [parameter for parameter in self.block.parameters() if parameter.requires_grad]
        self.totals = [torch.zeros(p.shape, dtype=MASTERS[compute], device=p.device) for p in self.trained]
        experts = spec.experts
        self.statistics = RouterStatistics.empty(experts.count, 7, self.source.device) if experts else None

    def forward(self, source: Tensor) -> Tensor:
        rotation = self.rotation
        if self.documents is not None:
            rotation = rotation_at(rotation, self.documents.positions)
        output: Tensor = self.block(source, rotation, self.mask, self.statistics, self.documents)
        return output

    def both(self) -> object:
        inner = self.source.detach().requires_grad_()
        of_input, *gradients = torch.autograd.grad(self.forward(inner), [inner, *self.trained], self.gradient)
        add(self.totals, gradients)
        return of_input

    @property
    def known(self) -> list[Tensor]:
        masks = [] if self.mask is None else [self.mask]
        bounds = [] if self.documents is None else [self.documents.bounds]
        return [self.source, self.gradient, *self.rotation, *masks, *bounds, *self.totals, *self.block.parameters()]


def documents_of(found: AutogradMemory) -> Documents | None:
    """Return three documents of different lengths per sequence; None if documents are not masked."""
    if not found.sizes.masks_documents:
        return None
    length = found.sizes.model.sequence_length
    rows = found.tokens // length
    tokens = torch.ones(rows, length + 1, dtype=torch.int64)
    for row in range(rows):
        tokens[row, [2 + row, length // 2 + row]] = 0
    return find_documents(tokens, 0, tokens)


def masters_of(module: nn.Module, compute: str) -> list[Tensor]:
    return [torch.zeros(p.shape, dtype=MASTERS[compute], device=p.device) for p in module.parameters()]


def add(totals: list[Tensor], gradients: Sequence[Tensor]) -> None:
    for total, gradient in zip(totals, gradients, strict=True):
        total.add_(gradient)


class EndPasses:
    """Backward passes of the head, including the loss, and of the embedding."""

    def __init__(self, found: AutogradMemory, compute: str) -> None:
        spec, dtype = found.sizes.model, DTYPES[compute]
        rows = found.tokens // spec.sequence_length
        self.loss = Loss(
            MASTERS[compute], found.max_chunk_tokens, logit_soft_cap(spec), 1e-3 if found.sizes.has_z_loss else 0.0
        )
        self.tokens = torch.randint(spec.vocabulary_size, (rows, spec.sequence_length))
        self.head, self.embedding = Head(spec).to(dtype), Embedding(spec).to(dtype)
        self.source = torch.randn(rows, spec.sequence_length, spec.hidden_size, dtype=dtype)
        self.of_head, self.of_embedding = masters_of(self.head, compute), masters_of(self.embedding, compute)

    def of_the_head(self) -> object:
        totals: dict[Tensor, Tensor] = dict(zip(self.head.parameters(), self.of_head, strict=True))

        def take(parameter: Tensor, gradient: Tensor) -> None:
            totals[parameter].add_(gradient)

        return self.loss.backward(self.head, self.source, self.tokens, 7, take)[1]

    def of_the_embedding(self) -> None:
        gradients = torch.autograd.grad(self.embedding(self.tokens), list(self.embedding.parameters()), self.source)
        add(self.of_embedding, gradients)

    @property
    def known(self) -> list[Tensor]:
        totals = [*self.of_head, *self.of_embedding]
        return [self.tokens, self.source, *totals, *self.head.parameters(), *self.embedding.parameters()]
