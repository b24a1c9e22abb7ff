"""Compare attention within documents with attention over whole sequences, in one layer: `python -m
benchmarks.documents [tokens of a sequence] [tokens of a document ...]`.

Both run forward and backward passes alternately in one process, so that other load on the machine affects both. Prints
the median ratio of their seconds, and the ratio of their operations as counted by `mfu`.
"""

import sys
import time
from collections.abc import Sequence
from statistics import median, quantiles

import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.data.documents import count_documents
from pseudoreal_trainer.model.attention import Documents, find_documents
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.rotary import rotary, rotation_at
from pseudoreal_trainer.plan.sizes import Sizes
from pseudoreal_trainer.plan.units import units_of
from torch import Tensor

_ROUNDS, _WARM_UP = 9, 1
_END, _SEQUENCES, _HIDDEN = 0, 2, 512


def model_of(length: int) -> Model:
    return Model(
        layers=1,
        hidden_size=_HIDDEN,
        attention=Attention(heads=_HIDDEN // 64),
        sequence_length=length,
        feed_forward=FeedForward(size=4 * _HIDDEN),
    )


def tokens_of(length: int, document: int) -> Tensor:
    """Return sequences of documents with `document` tokens each, the last one possibly shorter: [B, T + 1]."""
    tokens = torch.full((_SEQUENCES, length + 1), _END + 1)
    tokens[:, document - 1 :: document] = _END
    return tokens


def operations_ratio(length: int, document: int) -> float:
    """Return the operations over whole sequences divided by the operations within documents."""
    spec, tokens = model_of(length), _SEQUENCES * length
    sizes = Sizes(spec, units_of(spec, Sharing(blocks=1)), 4, 4, micro_batch=_SEQUENCES)
    counted = count_documents(tokens_of(length, document).numpy(), _END, [None])
    return sizes.block_flops(tokens) / sizes.block_flops(tokens, twice_the_pairs=counted.twice_the_pairs[None])


def compare(length: int, document: int) -> list[float]:
    """Return the seconds over whole sequences divided by the seconds within documents, per round."""
    spec, tokens = model_of(length), tokens_of(length, document)
    block, source = Block(spec), torch.randn(_SEQUENCES, length, _HIDDEN)
    rotation, documents = rotary(spec, length, source), find_documents(tokens, _END, tokens)
    placed = rotation_at(rotation, documents.positions)
    seconds = [
        [_seconds(block, source, rotation, None), _seconds(block, source, placed, documents)]
        for _ in range(_WARM_UP + _ROUNDS)
    ]
    return [whole / within for whole, within in seconds[_WARM_UP:]]


def _seconds(block: Block, source: Tensor, rotation: tuple[Tensor, Tensor], documents: Documents | None) -> float:
    begin = time.perf_counter()
    inner = source.detach().requires_grad_()
    out = block(inner, rotation, None, None, documents)
    torch.autograd.grad(out, [inner, *block.parameters()], source)
    return time.perf_counter() - begin


def main(arguments: Sequence[str]) -> None:
    length = int(arguments[0]) if arguments else 2048
    for document in [int(argument) for argument in arguments[1:]] or [64, 256, 1024]:
        ratios, fewer = compare(length, document), operations_ratio(length, document)
        low, _, high = quantiles(ratios, n=4)
        print(
            f"sequences of {length}, documents of {document:5}: {median(ratios):.2f} times as fast as whole sequences"
            f" (quartiles {low:.2f} to {high:.2f}), with {fewer:.2f} times fewer operations"
        )


if __name__ == "__main__":
    main(sys.argv[1:])
