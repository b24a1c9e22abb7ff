"""The trials of docs/method-plan.md at 124 M parameters, on one GPU and a text of the user: `python -m
benchmarks.method.gpu`.

Training continues where it ended: the scratch folder has the results, and the trained links that others still need.
"""

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import click
from pseudoreal_api.resolved.resolve import phase_config
from pseudoreal_dev.machine.progress import progress
from pseudoreal_trainer.data.tokens.native import Index, read_index
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.estimate.report import plan_phase
from pseudoreal_trainer.estimate.time.hardware import read_profile
from pseudoreal_trainer.plan.sizes import Device
from pseudoreal_trainer.storage.durable import write_atomically
from pydantic import BaseModel

from benchmarks.gpu.machine import describe
from benchmarks.method import arms
from benchmarks.method.arms import Scale, Study
from benchmarks.method.budget import tokens_within, with_tokens, work_of
from benchmarks.method.chain import Link, Run
from benchmarks.method.schedule import planned
from benchmarks.method.training import Place, quiet, train
from benchmarks.method.trials import Trials, train_all

_LEAST_STEPS = 20
"""Steps of the full budget, so that budgets, decays and stages begin at different steps."""
_TIMED_STEPS = 12
_ROUNDED_TO = 64
"""Vocabularies are rounded up to a multiple, which matrix units of GPUs prefer."""
_LITTLE_TEXT = 1 << 20
"""Bytes of validation text below which differences between arms are uncertain."""


class Settled(BaseModel, frozen=True):
    """Options with which the trials of a scratch folder began, and the budget that followed from them. Arms and seeds
    may be added later."""

    study: Study
    data: str
    tiny: bool
    wanted_tokens: int | None
    wanted_hours: float | None
    tokens: int
    """Tokens of the full budget."""


@dataclass(frozen=True)
class Pace:
    step: float
    """Seconds of a real step."""
    link: float
    """Seconds of a link besides its steps."""
    origin: str


@click.command()
@click.option(
    "--data", required=True, type=click.Path(path_type=Path), help="folder with token files: train, validation"
)
@click.option("--study", default="dense", type=click.Choice(get_args(Study)), show_default=True)
@click.option("--tokens", type=click.IntRange(min=1), help="full budget of a training; 20 for each parameter")
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), help="of all trainings; the budget follows")
@click.option("--hardware", type=click.Path(path_type=Path), help="profile of the machine, for predicted times")
@click.option("--seeds", default=3, type=click.IntRange(1, 20), show_default=True)
@click.option("--arm", "names", multiple=True, help="arms besides the unshared one; all of them")
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]), show_default=True)
@click.option("--tiny", is_flag=True, help="models so small that only the program is tried")
@click.option(
    "--scratch",
    type=click.Path(path_type=Path),
    default=Path(os.environ.get("OUT", "."), "method-trials"),
    show_default=True,
    help="folder of checkpoints and of the results, STUDY.csv",
)
def main(
    data: Path,
    study: Study,
    tokens: int | None,
    hours: float | None,
    hardware: Path | None,
    seeds: int,
    names: tuple[str, ...],
    device: Literal["cpu", "cuda"],
    tiny: bool,
    scratch: Path,
) -> None:
    """Train the arms of docs/method-plan.md, one training at a time: first to choose peak rates, then compared."""
    if tokens is not None and hours is not None:
        raise click.UsageError("--tokens and --hours both give the budget; give one")
    _check_device(device)
    quiet()
    data, scratch = data.resolve(), scratch.resolve()
    text, held_out = _index(data / "train"), _index(data / "validation")
    scale = _scale(data, study, names, seeds, text, tiny=tiny)
    place = Place(scratch, data.parent, device, threads=len(os.sched_getaffinity(0)) if device == "cuda" else 1)
    scratch.mkdir(parents=True, exist_ok=True)
    wanted = Settled(study=study, data=str(data), tiny=tiny, wanted_tokens=tokens, wanted_hours=hours, tokens=0)
    known = _known(scratch, wanted)
    pace = predicted_pace(scale, study, place, hardware) if hardware is not None else None
    if known is None:
        if hours is not None:
            pace = pace or _timed(scale, study, place)
            tokens = tokens_within(scale, study, 3600 * hours, pace.step, pace.link)
        elif tokens is None:
            tokens = arms.full_steps(study, scale.tuned_width, scale) * scale.tokens_of_a_step
        known = wanted.model_copy(update={"tokens": tokens})
    scale = with_tokens(scale, study, known.tokens)
    _check_budget(scale, study, text, data)
    write_atomically(_file(scratch), known.model_dump_json())
    machine = describe(device)
    _announce(scale, study, text, held_out, machine.device, pace)
    results = scratch / f"{study}.csv"
    train_all(Trials(lambda known: planned(known, scale), place, results, machine.commit[:10], keeps_links=False))
    progress.note(f"all trainings are done; their losses are in {results}")


def _check_device(device: Literal["cpu", "cuda"]) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise click.UsageError("torch finds no GPU that it can use; --device cpu --tiny tries the program without one")


def _index(folder: Path) -> Index:
    try:
        return read_index(folder)
    except InvalidJobError as error:
        raise click.UsageError(
            f"{error}. --data names a folder whose folders train and validation hold token files of"
            " `pseudoreal data prepare`"
        ) from error


def _scale(data: Path, study: Study, names: tuple[str, ...], seeds: int, text: Index, *, tiny: bool) -> Scale:
    scale = arms.TINY if tiny else arms.GPU
    known = scale.arms[study]
    if unknown := {*names} - {arm.name for arm in known}:
        raise click.UsageError(
            f"--arm {min(unknown)!r} is none of {study}'s arms: {', '.join(repr(arm.name) for arm in known)}"
        )
    chosen = tuple(arm for arm in known if not names or arm.name in ("unshared", *names))
    return replace(
        scale,
        arms={study: chosen},
        sizes={study: tuple(replace(size, seeds=seeds) for size in scale.sizes[study])},
        vocabulary=-(-text.vocabulary // _ROUNDED_TO) * _ROUNDED_TO,
        text=data.name,
        tuning_text=data.name,
    )


def _file(scratch: Path) -> Path:
    return scratch / "trials.json"


def _known(scratch: Path, wanted: Settled) -> Settled | None:
    """Return the options of the trials in the scratch folder; None if there are none. Raises UsageError if they have
    other options."""
    if not _file(scratch).exists():
        return None
    known = Settled.model_validate_json(_file(scratch).read_bytes())
    for name in Settled.model_fields:
        before, now = getattr(known, name), getattr(wanted, name)
        if name != "tokens" and before != now:
            option = name.removeprefix("wanted_")
            raise click.UsageError(
                f"{scratch} holds trials with --{option} {before}, and now it is {now}; go on with the same options, or"
                " name another folder with --scratch"
            )
    return known


def _real_link(scale: Scale, study: Study, end: int | None = None) -> Link:
    """Return the unshared arm in one link, at a middle rate, for times alone."""
    rate = scale.first_rates[len(scale.first_rates) // 2]
    run = Run(study, scale.arms[study][0], scale.tuned_width, arms.TUNING_SEED, rate, scale.text, scale=scale)
    return Link(run, run.arm.stages, end or run.steps)


def predicted_pace(scale: Scale, study: Study, place: Place, hardware: Path) -> Pace:
    """Return the planner's seconds of a real step. Raises UsageError."""
    link = _real_link(scale, study)
    config = phase_config(link.job(place.data(link)), 0, execution=1, work_directory=".", offload_directory=".")
    try:
        profile = read_profile(hardware)
        kind: Device = "cpu" if place.device == "cpu" else "accelerator"
        line = plan_phase(config, kind, profile, threads=place.threads).timeline
    except ValueError as error:
        raise click.UsageError(f"--hardware {hardware}: {error}") from error
    return Pace(line.seconds, 0.0, f"predicted from {hardware}, without starts and validation")


def _timed(scale: Scale, study: Study, place: Place) -> Pace:
    """Return the pace of a short training."""
    link = _real_link(scale, study, _TIMED_STEPS)
    with progress.step(f"timing {_TIMED_STEPS} steps"):
        begin = time.monotonic()
        trained = train(link, place)
        seconds = time.monotonic() - begin
    shutil.rmtree(place.folder(link))
    step = trained.seconds_per_step
    return Pace(step, max(0.0, seconds - _TIMED_STEPS * step), f"measured in {_TIMED_STEPS} steps")


def _check_budget(scale: Scale, study: Study, text: Index, data: Path) -> None:
    steps = arms.full_steps(study, scale.tuned_width, scale)
    read, a_step = steps * scale.tokens_of_a_step, scale.tokens_of_a_step
    if steps < _LEAST_STEPS:
        raise click.UsageError(
            f"the full budget is {steps:,} steps of {a_step:,} tokens, and fewer than {_LEAST_STEPS} are not compared:"
            f" give --tokens {_LEAST_STEPS * a_step} or more, or more --hours, or fewer arms with --arm, or --seeds 1"
        )
    # The last token of the files is a target alone.
    if text.tokens <= read:
        raise click.UsageError(
            f"{data / 'train'} has {text.tokens:,} tokens, and a training reads {read:,}, no token twice: prepare more"
            f" text, or give --tokens {(text.tokens - 1) // a_step * a_step} or less"
        )


def _announce(scale: Scale, study: Study, text: Index, held_out: Index, device: str, pace: Pace | None) -> None:
    """Print what will be trained, and how long it takes."""
    width, work, size = scale.tuned_width, work_of(scale), scale.sizes[study][0]
    steps = arms.full_steps(study, width, scale)
    lines = [
        f"{study}, {width} wide, {arms.parameters(study, width):,} parameters for a token besides the embedding;"
        f" {scale.precision} on {device}",
        f"arms, {size.seeds} seeds each: {', '.join(arm.name for arm in scale.arms[study])}",
        f"full budget: {steps * scale.tokens_of_a_step:,} tokens, {scale.tokens_per_parameter:.3g} for each of these"
        f" parameters, in {steps:,} steps; the text has {text.tokens:,}",
        f"in all about {work.links} trainings, {work.steps * scale.tokens_of_a_step:,.0f} tokens, as some continue"
        " others",
    ]
    if pace is None:
        lines.append("time: unknown; the line of each training says how long the others take")
    else:
        hours = work.seconds(pace.step, pace.link) / 3600
        lines.append(f"time: {hours:.2g} h, at {pace.step:.3g} s a step, {pace.origin}")
    if held_out.text_bytes < _LITTLE_TEXT:
        lines.append(
            f"the validation text has {held_out.text_bytes:,} bytes; below {_LITTLE_TEXT:,} differences are uncertain"
        )
    for line in lines:
        progress.say(line)


if __name__ == "__main__":
    main()
