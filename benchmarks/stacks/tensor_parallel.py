"""torch's tensor parallelism with sequence parallelism and a parallel loss, by torchtitan's plan for Llama."""

from collections.abc import Iterator

import torch
from pseudoreal_trainer.model.reference import Transformer
from pseudoreal_trainer.model.rotary import rotary
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.stacks.plain import plain_model
from benchmarks.work import BETAS, EPSILON, LEARNING_RATE, WEIGHT_DECAY, Work, cross_entropy

_BLOCK = {
    "attention_norm": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1), None, None, None), desired_input_layouts=(Replicate(), None, None, None)
    ),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.output": RowwiseParallel(output_layouts=Shard(1)),
    "ffn_norm": SequenceParallel(),
    "ffn": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "ffn.up": ColwiseParallel(),
    "ffn.down": RowwiseParallel(output_layouts=Shard(1)),
}
_ENDS = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}


def train(work: Work, rank: int, world: int) -> Iterator[Tensor]:  # noqa: ARG001
    mesh = init_device_mesh("cpu", (world,))
    model = plain_model(work)
    for block in model.blocks:
        parallelize_module(block, mesh, _BLOCK)
    parallelize_module(model, mesh, _ENDS)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    )
    for batch in work.batches:
        total = torch.zeros(())
        # All ranks compute all sequences together.
        for tokens in batch.chunk(work.micro_batches):
            with loss_parallel():
                loss = cross_entropy(_logits(model, tokens[:, :-1]), tokens) / work.micro_batches
                loss.backward()
            assert isinstance(loss, DTensor), "all ranks have the loss of all tokens"
            total += loss.full_tensor().detach()
        optimizer.step()
        optimizer.zero_grad()
        yield total


def _logits(model: Transformer, tokens: Tensor) -> Tensor:
    """Return the logits as `Transformer.forward` does, but by the head's module, whose hooks cut the vocabulary."""
    assert model.head is not None, "the measured models have separate embeddings"
    hidden = model.embedding(tokens)
    rotation = rotary(model.spec, tokens.shape[1], hidden)
    for block in model.layer_blocks:
        hidden = model.blocks[block](hidden, rotation, None, None, None)
    logits: Tensor = model.head(model.norm(hidden))
    return logits
