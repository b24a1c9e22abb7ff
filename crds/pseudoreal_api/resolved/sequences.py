"""Limits of context parallelism and of tensor parallelism, which divide the tokens of sequences among ranks. Pure."""

from collections.abc import Iterator

from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.optimizer import Optimizer, Precision


def most_context_ranks(model: Model) -> int:
    """Return the largest possible number of context ranks, with any number of ranks; the other possible numbers are its
    divisors. Each sequence is cut into two equal chunks per context rank. Experts that count the tokens of whole
    sequences allow only one context rank."""
    length = model.sequence_length
    return 1 if counts_sequences(model) or length % 2 else length // 2


def counts_sequences(model: Model) -> bool:
    """Return whether experts count the tokens of whole sequences."""
    top_k = model.top_k
    return model.experts is not None and (
        top_k is None or (top_k.balance_over == "Sequence" and float(top_k.auxiliary_loss) > 0)
    )


def obstacle_to_tensor_ranks(
    model: Model,
    optimizer: Optimizer,
    precision: Precision,
    tensor_ranks: int,
    *,
    context_ranks: int = 1,
    sequence_chunks: int = 1,
    measures: bool = False,
) -> str | None:
    """Return why the matrices of layers cannot be cut over `tensor_ranks` ranks, as the end of a sentence about that
    number; None if they can. `measures`: whether the phase compares the gradients of layers."""
    shapes = _obstacles_in_shapes(model, tensor_ranks, context_ranks)
    of_fields = _obstacles_in_fields(model, optimizer, precision, sequence_chunks, measures=measures)
    return next((reason for is_met, reason in (*shapes, *of_fields) if is_met), None)


def _obstacles_in_shapes(model: Model, ranks: int, context_ranks: int) -> Iterator[tuple[bool, str]]:
    """Yield (whether the obstacle is there, reason)."""
    has_dense_layers = model.layers_with_experts < model.layers
    keys, shared, length = model.key_size // model.head_size, model.shared_expert, model.sequence_length
    for name, size in {
        "spec.model.attention.heads": model.attention.heads,
        "spec.model.feedForward.size": model.feed_forward.size if has_dense_layers else 0,
        "the intermediate size of the shared experts": shared.size if shared else 0,
    }.items():
        yield size % ranks != 0, f"must divide {name}, and it is {size}; change one of them"
    yield (
        keys % ranks != 0 and ranks % keys != 0,
        f"must divide spec.model.attention.keyValueHeads {keys} or be a multiple of it, so that each rank needs whole"
        " heads; change one of them",
    )
    of_sequence = context_ranks * ranks
    yield (
        length % (2 * of_sequence) != 0,
        f"times contextRanks {context_ranks} cuts each sequence into {2 * of_sequence} equal chunks, and"
        f" spec.model.sequenceLength {length} has no such chunks; change one of them",
    )


def _obstacles_in_fields(
    model: Model, optimizer: Optimizer, precision: Precision, sequence_chunks: int, *, measures: bool
) -> Iterator[tuple[bool, str]]:
    yield (
        model.attention.query_key_norm == "AllHeads",
        "cuts attention by heads, but spec.model.attention.queryKeyNorm AllHeads needs all heads of a token; set"
        " PerHead or None, or remove tensorRanks",
    )
    yield (
        counts_sequences(model),
        "divides the tokens of sequences among ranks, but spec.model.experts counts the tokens of whole sequences, for"
        " capacityFactor or for auxiliaryLoss; set experts.type TopK, and topK.balanceOver Step with an auxiliaryLoss,"
        " or remove tensorRanks",
    )
    yield (
        optimizer.algorithm == "Muon",
        "cuts matrices, but spec.optimizer.algorithm Muon needs whole ones; set AdamW, or remove tensorRanks",
    )
    yield (
        optimizer.moments != "Master",
        f"needs spec.optimizer.moments Master, and it is {optimizer.moments}: other moments are rounded in the order of"
        " whole matrices; remove one of them",
    )
    yield (
        precision.products != "Compute",
        f"needs spec.precision.products Compute, and it is {precision.products}: a scale belongs to a whole row of"
        " activations; remove one of them",
    )
    yield (
        sequence_chunks > 1,
        f"needs activations.sequenceChunks 1, and it is {sequence_chunks}: a layer with slices computes all tokens at"
        " once; remove one of them",
    )
    yield (
        measures,
        "cuts the gradients of layers, but until.gradientCorrelation and delink.optimizerState Measured compare whole"
        " ones; remove one of them",
    )
