"""The plain reference: one process, ordinary autograd, torch.optim.AdamW, without any code of the engine."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, reduce
from operator import add

import torch
from pseudoreal_trainer.model.reference import Transformer, build_model, load_into
from pseudoreal_trainer.model.sampling import draw
from pseudoreal_trainer.plan.units import are_experts, unit_of
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.adamw import adamw, adamw_of_tensors
from tests.support.float8 import round_products
from tests.support.muon import MuonAndAdamW
from tests.support.rounding import round_moments
from tests.support.routers import Routers
from tests.unit.trainer.data.support.cut import cut
from tests.unit.trainer.engine.support.cases import (
    END,
    PROMPTS,
    RATE,
    SAMPLING,
    SEED,
    WRITTEN,
    Case,
)


def batch_of(case: Case, step: int) -> Tensor:
    """Return the batch of a step, [micro-batches, sequences of a micro-batch over all data ranks, T + 1]."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (case.micro_batches, case.sequences, case.model.sequence_length + 1)
    tokens = torch.randint(0, case.vocabulary, shape, generator=generator)
    if not case.documents:
        return tokens
    return tokens.masked_fill(torch.rand(shape, generator=generator) < 0.25, END)


def targets_of(case: Case, step: int) -> int:
    """Return the number of targets in a step; with masked documents, the end of a document has no target."""
    inputs = batch_of(case, step)[:, :, :-1]
    return int((inputs != END).sum()) if case.documents else inputs.numel()


def tokens_of(case: Case) -> int:
    """Return the number of tokens in a step, with or without a target."""
    return case.micro_batches * case.sequences * case.model.sequence_length


def part_of(batch: Tensor, data_rank: int, data_ranks: int) -> Tensor:
    """Return a data rank's sequences, [micro-batches, B, T + 1]."""
    count = batch.shape[1]
    return batch[:, count * data_rank // data_ranks : count * (data_rank + 1) // data_ranks]


def train(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Return the cross-entropy of each step, and the weights after the last step."""
    losses, weights, _ = train_with_moments(case)
    return losses, weights


def train_with_moments(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Return the same as `train`, and the first moments after the last step."""
    return _trained(_plain(case))


def _plain(case: Case) -> Case:
    """Return the case without all fields that a plain loop ignores, so that cases which differ only in those share one
    reference. The number of data ranks stays, because partial sums depend on it."""
    plain = Case()
    unknown = (
        *("pipeline", "order", "sharding", "homes", "window", "keep", "stash", "loss_chunk", "next_sharing"),
        *("expert_ranks", "expert_groups", "context_ranks", "tensor_ranks", "sequence_chunks"),
    )
    return replace(case, **{name: getattr(plain, name) for name in unknown})


@cache
def _trained(case: Case) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model, optimizer = model_and_optimizer(case)
    routers, losses = Routers(model), []
    for step in range(case.steps):
        losses.append(set_gradients(model, case, step, routers))
        round_gradients(model, case)
        clip(model, case)
        held = hold_idle(model, optimizer) if case.idle == "Skip" else {}
        optimizer.step()
        trained: dict[str, Tensor] = {name: p for name, p in model.named_parameters() if p.requires_grad}
        round_moments(trained, optimizer, SEED, step + 1, case.moments)
        put_back(held, optimizer)
        routers.balance(rounds=case.gradients == "BFloat16")
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return losses, weights, {name: optimizer.state[p]["exp_avg"] for name, p in trained.items()}


def model_and_optimizer(case: Case) -> tuple[Transformer, torch.optim.Optimizer]:
    dtype = {"float64": torch.float64, "float32": torch.float32}[case.precision]
    model = build_model(case.model, case.sharing, seed=SEED, dtype=dtype)
    round_products(model, case.products)
    # Biases of experts are stacked, and so have two dimensions.
    beginnings = tuple(f"{name.lower()}." for name in case.exclusions)
    excluded = [p for n, p in model.named_parameters() if n.startswith(beginnings) or n.endswith(".bias")]
    if case.algorithm == "Muon":
        named = ((n, p) for n, p in model.named_parameters() if p.requires_grad)
        return model, MuonAndAdamW(named, case.optimizer, RATE)
    optimizer = adamw(model.parameters(), case.optimizer, RATE, excluded=excluded)
    if case.multipliers:
        optimizer = adamw_of_tensors(
            ((n, p) for n, p in model.named_parameters() if p.requires_grad), case.optimizer, RATE
        )
    return model, optimizer


def hold_idle(model: Transformer, optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[Tensor, list[Tensor]]]:
    """Return stacked tensor -> experts that no token chose, with the values of the tensor and its moments. Such experts
    have zero gradients in all of their tensors; an expert with a token has other gradients."""
    stacked: dict[str, list[Tensor]] = {}
    for name, parameter in model.named_parameters():
        if are_experts(name):
            stacked.setdefault(unit_of(name, model.spec), []).append(parameter)
    held: dict[Tensor, tuple[Tensor, list[Tensor]]] = {}
    for parameters in stacked.values():
        gradients = [p.grad for p in parameters if p.grad is not None]
        idle = torch.stack([gradient.flatten(1).abs().sum(dim=1) == 0 for gradient in gradients]).all(dim=0)
        held |= {p: (idle, [each.detach().clone() for each in _state_of(p, optimizer)]) for p in parameters}
    return held


@torch.no_grad()
def put_back(held: dict[Tensor, tuple[Tensor, list[Tensor]]], optimizer: torch.optim.Optimizer) -> None:
    for parameter, (idle, before) in held.items():
        for now, then in zip(_state_of(parameter, optimizer), before, strict=False):
            now[idle] = then[idle]


def _state_of(parameter: Tensor, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return the weights and moments. Before the first step there are no moments; after it, the moments of idle experts
    are zero."""
    state = optimizer.state.get(parameter, {})
    return [parameter, *(state[kind] for kind in ("exp_avg", "exp_avg_sq") if kind in state)]


def set_gradients(model: Transformer, case: Case, step: int, routers: Routers | None = None) -> float:
    """Set the gradients of a step's batch and return its cross-entropy. `routers`: None without top-k experts."""
    if routers is not None:
        routers.begin()
    batch = batch_of(case, step)
    parts = [_gradients(model, case, part_of(batch, d, case.data), step, routers) for d in range(case.data)]
    for index, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        # Partial sums of the data ranks, added up in their order.
        parameter.grad = torch.stack([gradients[index] for _, gradients in parts]).sum(dim=0)
    return sum(loss for loss, _ in parts) / targets_of(case, step)


def round_gradients(model: Transformer, case: Case) -> None:
    for parameter in model.parameters():
        if case.gradients == "BFloat16" and parameter.grad is not None:
            parameter.grad = parameter.grad.to(torch.bfloat16).to(parameter.dtype)


@torch.no_grad()
def evaluate(case: Case, weights: dict[str, Tensor]) -> float:
    """Return the sum of the losses of the first batch, in nats."""
    model = build_model(case.model, case.sharing, seed=0, dtype=torch.float64)
    round_products(model, case.products)
    load_into(model, weights)
    pairs = _pairs(case, batch_of(case, 0).flatten(0, 1))
    sums = [F.cross_entropy(model(i).flatten(0, 1), wanted.flatten(), reduction="sum") for i, wanted in pairs]
    return float(reduce(add, sums))


def _pairs(case: Case, windows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets, [n, L] each, of the passes over windows [B, T + 1]: one pass with all of them, or
    one for each document."""
    if not case.documents:
        yield windows[:, :-1], windows[:, 1:]
        return
    for row in windows.tolist():
        for part in cut(row, END):
            inputs, wanted = zip(*part, strict=True)
            yield torch.tensor([inputs]), torch.tensor([[-100 if target is None else target for target in wanted]])


@torch.no_grad()
def write(case: Case, weights: dict[str, Tensor]) -> list[list[int]]:
    """Return the tokens after each of PROMPTS, from a plain loop over whole sequences. Zeros follow the text; no token
    sees them."""
    model = build_model(case.model, case.sharing, seed=0, dtype=torch.float64)
    load_into(model, weights)
    seeds = range(SAMPLING.seed, SAMPLING.seed + len(PROMPTS))
    return [_behind(model, *each, documents=case.documents) for each in zip(PROMPTS, seeds, strict=True)]


def _behind(model: Transformer, prompt: list[int], seed: int, *, documents: bool) -> list[int]:
    length, text, generator = model.spec.sequence_length, [*prompt], torch.Generator().manual_seed(seed)
    for _ in range(WRITTEN):
        seen = text[-length:]
        if documents:
            # Append any token that does not end a document: the last part is then the newest document.
            seen = [token for token, _ in cut([*seen, END + 1], END)[-1]]
        logits = model(torch.tensor([seen + [0] * (length - len(seen))]))[0, len(seen) - 1]
        text.append(draw(logits, SAMPLING, generator))
    return text[len(prompt) :]


def _gradients(
    model: Transformer, case: Case, part: Tensor, step: int, routers: Routers | None
) -> tuple[float, list[Tensor]]:
    """Return the summed cross-entropies and the gradients of one data rank's sequences, micro-batch after micro-batch.
    Auxiliary losses count all tokens of whole sequences, including tokens without a target."""
    model.zero_grad()
    sums = []
    for windows in part:
        found = [(model(inputs), wanted) for inputs, wanted in _pairs(case, windows)]
        loss_sum = reduce(
            add, [F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") for logits, wanted in found]
        )
        sums.append(loss_sum.detach())
        if case.z_loss != "0":
            squares = [(logits.exp().sum(-1).log().square() * (wanted != -100)).sum() for logits, wanted in found]
            loss_sum = loss_sum + float(case.z_loss) * reduce(add, squares)
        loss = loss_sum / targets_of(case, step)
        if routers is not None:
            loss = loss + routers.take() / tokens_of(case)
        loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    return float(torch.stack(sums).sum()), gradients


def clip(model: Transformer, case: Case) -> None:
    norm = float(case.optimizer.clipping.norm)
    if case.clipping == "Global":
        nn.utils.clip_grad_norm_(model.parameters(), norm)
    elif case.clipping == "PerUnit":
        names = {name: unit_of(name, case.model) for name, _ in model.named_parameters()}
        for unit in {*names.values()}:
            nn.utils.clip_grad_norm_([p for name, p in model.named_parameters() if names[name] == unit], norm)
