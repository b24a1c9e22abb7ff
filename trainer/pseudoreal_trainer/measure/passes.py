"""Speeds of forward and backward passes, and scratch memory of kernels, for several widths and numbers of tokens."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import torch
from pseudoreal_api.spec.model import Attention, FeedForward, Model
from pseudoreal_api.spec.phase import Sharing
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pseudoreal_trainer.accelerator.adapters import kind_of
from pseudoreal_trainer.estimate.time.hardware import PassSpeed, Precision
from pseudoreal_trainer.measure.timing import seconds_of
from pseudoreal_trainer.model.block import Block
from pseudoreal_trainer.model.head import Head
from pseudoreal_trainer.model.loss import Loss
from pseudoreal_trainer.model.rotary import rotary
from pseudoreal_trainer.plan.memory.autograd_memory import AutogradMemory
from pseudoreal_trainer.plan.sizes import Device, Sizes, compute_bytes, master_bytes
from pseudoreal_trainer.plan.units import units_of


def scratch_share(act: Callable[[], object], device: torch.device, planned: int) -> float:
    """Return the bytes of scratch memory per byte of `planned`, the peak of `act` according to the plan."""
    most = most_on_cpu(act) if device.type == "cpu" else _most_on_accelerator(act, device)
    return max(0.0, most / planned - 1)


def most_on_cpu(act: Callable[[], object]) -> int:
    """Return the peak number of bytes that `act` holds at a time. torch's profiler reports allocations only in a trace
    file."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        act()
    with tempfile.TemporaryDirectory(prefix="pseudoreal-") as folder:
        file = Path(folder, "trace.json")
        recorded.export_chrome_trace(str(file))
        events = json.loads(file.read_bytes())["traceEvents"]
    held = most = 0
    for event in sorted((event for event in events if event["name"] == "[memory]"), key=lambda event: event["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most


def _most_on_accelerator(act: Callable[[], object], device: torch.device) -> int:
    torch.accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    before = torch.accelerator.memory_allocated(device)
    act()
    torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


_DTYPES: dict[Precision, torch.dtype] = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SEQUENCE: dict[Device, int] = {"accelerator": 2048, "cpu": 128}
_HEAD_WIDTH: dict[Device, int] = {"accelerator": 128, "cpu": 32}
"""Width of an attention head, as in models trained on such a device. Attention's share of a block's time depends on
this width."""
_VOCABULARY: dict[Device, int] = {"accelerator": 32768, "cpu": 256}
"""Number of tokens in the vocabulary. With a small vocabulary, the head is slow on an accelerator: on an H100 with 256
tokens, it reached a fifteenth of the speed of a block."""
_LONG_SECONDS = 0.05


@dataclass(frozen=True)
class Cell:
    """One measurement: a type, a width and a number of tokens."""

    compute: Precision
    hidden: int
    tokens: int
    device: Device = "cpu"

    @property
    def sizes(self) -> Sizes:
        model = Model(
            layers=1,
            hidden_size=self.hidden,
            attention=Attention(heads=self.hidden // _HEAD_WIDTH[self.device]),
            sequence_length=min(_SEQUENCE[self.device], self.tokens),
            feed_forward=FeedForward(size=4 * self.hidden),
            vocabulary_size=_VOCABULARY[self.device],
        )
        compute, master = compute_bytes(self.compute), master_bytes(self.compute)
        return Sizes(model, units_of(model, Sharing(blocks=1)), compute, master, micro_batch=1, device=self.device)

    @property
    def flops(self) -> int:
        """Floating-point operations of a block's forward pass."""
        return self.sizes.block_flops(self.tokens)


def rows(device: torch.device) -> list[list[Cell]]:
    """Return the measurements in rows. The cells of a row have one precision and width, in ascending order of
    tokens."""
    kind = kind_of(device)
    on_accelerator = kind == "accelerator"
    widths = (1024, 4096, 8192) if on_accelerator else (64, 128, 256, 512)
    lengths = (512, 4096, 16384) if on_accelerator else (64, 256, 1024, 4096)
    places = product(_DTYPES, widths)
    return [[Cell(compute, width, tokens, kind) for tokens in lengths] for compute, width in places]


def is_slow(cell: Cell, speed: PassSpeed) -> bool:
    """Return whether the cell took so long that more tokens need no measurement: they would take too long, and would
    not reach a higher speed."""
    return cell.flops / speed.block_forward_flops_per_second > _LONG_SECONDS


def measure_cell(cell: Cell, device: torch.device) -> PassSpeed:
    spec, dtype = cell.sizes.model, _DTYPES[cell.compute]
    with torch.device(device):
        block, head = Block(spec).to(dtype), Head(spec).to(dtype)
        source = torch.randn(
            cell.tokens // spec.sequence_length, spec.sequence_length, spec.hidden_size, dtype=dtype
        )  # [B, T, H]
        targets = torch.randint(spec.vocabulary_size, source.shape[:2])  # [B, T]
    rotation = rotary(spec, spec.sequence_length, source)

    def forward() -> Tensor:
        with torch.no_grad():
            hidden: Tensor = block(source, rotation)
            return hidden

    backward = _backward(block, source, lambda hidden: block(hidden, rotation), source)
    once, both = seconds_of(forward, device), seconds_of(backward, device)
    loss = Loss(torch.float32)
    whole = seconds_of(lambda: loss.backward(head, source, targets, 1, take=lambda *_: None), device)
    flops = cell.flops
    sizes = replace(cell.sizes, device=kind_of(device))
    return PassSpeed(
        compute=cell.compute,
        hidden=cell.hidden,
        tokens=cell.tokens,
        block_forward_flops_per_second=flops / once,
        # The lower bound guards against noise in the difference of two measurements.
        block_backward_flops_per_second=2 * flops / max(both - once, both / 3),
        head_flops_per_second=6 * spec.vocabulary_size * cell.hidden * cell.tokens / whole,
        scratch_share=scratch_share(backward, device, AutogradMemory(sizes, cell.tokens).block_backward),
    )


def _backward(
    module: torch.nn.Module, source: Tensor, run: Callable[[Tensor], Tensor], gradient: Tensor
) -> Callable[[], object]:
    """Return a function that runs a forward and a backward pass, as with recomputation."""

    def act() -> object:
        inner = source.detach().requires_grad_()
        return torch.autograd.grad(run(inner), [inner, *module.parameters()], gradient)

    return act
