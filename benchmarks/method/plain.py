"""Train a link of an arm whose sharing no job has: the reference model, autograd, and torch's own AdamW.

The weights, the order of the samples, the rates and the moments after a delink are those of the trainer, so that the
arm compares with arms that jobs train.
"""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_api.spec.model import TopK
from pseudoreal_api.spec.phase import Sharing
from pseudoreal_trainer.data.order import phase_samples
from pseudoreal_trainer.data.sources import MixedStream
from pseudoreal_trainer.data.token_corpus import TokenCorpus, open_corpus
from pseudoreal_trainer.model.reference import Transformer, build_model
from pseudoreal_trainer.plan.units import are_experts
from pseudoreal_trainer.training.schedule import learning_rate
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy, one_hot

from benchmarks.method.arms import Stage
from benchmarks.method.chain import Link
from tests.support.adamw import adamw

_STATE = "plain.pt"


def train_plainly(
    link: Link, data: str, folder: Path, parent: Path | None
) -> tuple[Transformer, PhaseConfig, list[float]]:
    """Train the link from the state in the folder `parent`, or from fresh weights; write its state to `folder`. Return
    the trained model, the config of its last phase, and the seconds of its steps."""
    config = phase_config(
        link.job(data),
        len(link.stages) - 1,
        execution=1,
        work_directory=str(folder),
        offload_directory=str(folder / "offload"),
    )
    training = _Training(config, _stage_at(link, max(0, link.begin - 1)))
    if parent is not None:
        training.load(torch.load(parent / _STATE))
    seconds = []
    for step, windows in enumerate(_windows(config, link), start=link.begin):
        begin = perf_counter()
        if (stage := _stage_at(link, step)) != training.stage:
            training.untie(stage)
        training.step(windows, learning_rate(config.optimizer, step + 1, config.total_steps))
        seconds.append(perf_counter() - begin)
    torch.save(training.state(), folder / _STATE)
    return training.materialize(), config, seconds


def _stage_at(link: Link, step: int) -> Stage:
    """Return the stage of the step after `step` steps."""
    run = link.run
    return next(stage for stage in run.arm.stages if step < round(run.steps * stage.until))


def _windows(config: PhaseConfig, link: Link) -> Iterator[Tensor]:
    """Yield the windows of each step, [B, T + 1]."""
    corpus = open_corpus(config)
    assert isinstance(corpus, TokenCorpus), "a link names its token files"
    mixed = phase_samples(0, config.mixtures[0].weights, {})
    stream = MixedStream(mixed, corpus.sources, config.model.sequence_length)
    sequences = config.batch.sequences
    for step in range(link.begin, link.end):
        yield torch.from_numpy(stream.windows(step * sequences, (step + 1) * sequences)).to(torch.int64)


def owner(stage: Stage, layer: int, name: str) -> int:
    """Return the layer whose weights a layer has in a stage. `name`: a parameter's name within its block."""
    is_own = "norm" in name or name.startswith("router")
    match stage.ties:
        case "Middle":
            quarter = stage.layers // 4
            return quarter if quarter <= layer < stage.layers - quarter else layer
        case "Matrices":
            return layer if is_own else 0
        case None if stage.shares_experts and not are_experts(f"blocks.{layer}.{name}"):
            return layer
        case None:
            return layer % stage.blocks


class _Training:
    """An unshared model whose layers may have the weights of other layers, and the optimizer of the distinct ones."""

    def __init__(self, config: PhaseConfig, stage: Stage) -> None:
        self._config = config
        self._model = build_model(config.model, Sharing(blocks=stage.layers), config.data.seed, torch.float32)
        self._balance = _Balance(self._model)
        initial = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        self._tie(stage, initial)

    def _tie(self, stage: Stage, values: dict[str, Tensor]) -> None:
        """Begin the stage with these values of each layer's parameters."""
        self.stage = stage
        self._owners = {name: _owner_name(stage, name) for name in values}
        self._weights = {name: nn.Parameter(values[name]) for name in dict.fromkeys(self._owners.values())}
        self._optimizer = adamw(self._weights.values(), self._config.optimizer, 0.0)

    def untie(self, stage: Stage) -> None:
        """Begin a stage with weights of its own for each layer. The first moment of a weight that n layers had is
        divided by n, the second by n squared, as with delink.optimizerState Scale."""
        uses = [*self._owners.values()]
        values = {name: self._weights[own].detach().clone() for name, own in self._owners.items()}
        moments = {}
        for name, own in self._owners.items():
            state, count = self._optimizer.state[self._weights[own]], uses.count(own)
            moments[name] = {
                "step": state["step"].clone(),
                "exp_avg": state["exp_avg"] / count,
                "exp_avg_sq": state["exp_avg_sq"] / count**2,
            }
        self._tie(stage, values)
        for name, weight in self._weights.items():
            self._optimizer.state[weight] = moments[name]

    def step(self, windows: Tensor, rate: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        parameters: dict[str, Tensor] = {name: self._weights[own] for name, own in self._owners.items()}
        logits = functional_call(self._model, parameters, (windows[:, :-1],))
        loss = cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()) + self._balance.take()
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights.values(), float(self._config.optimizer.clipping.norm))
        self._optimizer.step()

    def state(self) -> dict[str, Any]:
        moments = {name: self._optimizer.state[weight] for name, weight in self._weights.items()}
        return {"weights": {name: weight.detach() for name, weight in self._weights.items()}, "moments": moments}

    def load(self, state: dict[str, Any]) -> None:
        for name, weight in self._weights.items():
            weight.data.copy_(state["weights"][name])
            self._optimizer.state[weight] = state["moments"][name]

    def materialize(self) -> Transformer:
        """Return the model with its present weights."""
        self._model.load_state_dict({name: self._weights[own].detach() for name, own in self._owners.items()})
        return self._model


def _owner_name(stage: Stage, name: str) -> str:
    if not name.startswith("blocks."):
        return name
    _, layer, within = name.split(".", 2)
    return f"blocks.{owner(stage, int(layer), within)}.{within}"


class _Balance:
    """The auxiliary losses of a step's routers (DeepSeek-V3, equations 17 to 20), the mean over its tokens."""

    def __init__(self, model: Transformer) -> None:
        self._top_k: TopK | None = model.spec.experts.top_k if model.spec.experts else None
        self._logits: list[Tensor] = []
        if self._top_k is not None:
            routers: list[Any] = [block.router for block in model.blocks]
            for router in routers:
                router.register_forward_hook(lambda _module, _inputs, logits: self._logits.append(logits))

    def take(self) -> Tensor | float:
        """Return the loss of the newest pass, summed over the layers."""
        if self._top_k is None:
            return 0.0
        per_token, total = self._top_k.per_token, torch.zeros(())
        for logits in self._logits:
            scores = logits.softmax(dim=-1)  # [B, T, experts]
            experts = scores.shape[-1]
            chosen = one_hot(scores.topk(per_token, dim=-1).indices, experts).sum(dim=-2).float()
            frequency = experts / per_token * chosen.mean(dim=1)  # [B, experts]
            total = total + float(self._top_k.auxiliary_loss) * (frequency * scores.mean(dim=1)).sum(dim=-1).mean()
        self._logits = []
        return total
