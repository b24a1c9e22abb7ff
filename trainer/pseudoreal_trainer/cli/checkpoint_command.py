"""The commands `pseudoreal sample`, `inspect`, `verify`, `delink`, `export` and `prune`. Folders may be s3:// URLs.

Exit codes: 0; 1 for a corrupt checkpoint; 2 for a wrong command line (click's own); 78 for an impossible request.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, get_args

import click
from pseudoreal_api.base import DnsLabel, Quantity
from pseudoreal_api.quantity import bytes_of, readable_bytes
from pseudoreal_api.resolved.layers import blocks_of_layers, experts_of_layers, sets_of
from pseudoreal_api.spec.phase import OptimizerState, SharedPart, Sharing
from pydantic import TypeAdapter, ValidationError
from rich.console import Console
from rich.progress import track

from pseudoreal_trainer.checkpoint.delink import Target, delinked
from pseudoreal_trainer.checkpoint.heads import HeadCache, read_manifest
from pseudoreal_trainer.checkpoint.manifest import Head, Manifest
from pseudoreal_trainer.checkpoint.materialize import materialize
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.store import CheckpointStore, CorruptCheckpoint, removable
from pseudoreal_trainer.cli.common import CommandError, ExitStatus
from pseudoreal_trainer.convert.export import check_absent, export_checkpoint
from pseudoreal_trainer.convert.formats import FORMATS
from pseudoreal_trainer.convert.huggingface import Options
from pseudoreal_trainer.convert.tokenizer_files import Source
from pseudoreal_trainer.data.tokenizer.saved import tokenizer_file
from pseudoreal_trainer.data.tokenizer.tokenizer import TOKENIZER_FILE
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.path import ObjectPath, StoragePath, storage_path


@dataclass(frozen=True)
class OpenCheckpoint:
    store: CheckpointStore
    manifest: Manifest
    renamed: str | None = None
    """Name of the folder, if it differs from the manifest's."""

    @property
    def reader(self) -> Reader:
        return self.store.reader(self.manifest)


class _CheckpointFolder(click.ParamType[OpenCheckpoint]):
    """Click parameter type: a checkpoint's folder, with a manifest."""

    name = "folder"

    def __init__(self, *, may_be_renamed: bool = False) -> None:
        """`may_be_renamed`: accept a folder with another name than the manifest's."""
        self._may_be_renamed = may_be_renamed

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> OpenCheckpoint:
        folder = _path(value)
        try:
            manifest = read_manifest(folder)
        except TrainingError as error:
            self.fail(str(error), param, ctx)
        if manifest is None:
            self.fail(f"{folder} holds no readable manifest.json", param, ctx)
        store = CheckpointStore(folder.parent.parent, manifest.job.uid)
        if manifest.name == folder.name:
            return OpenCheckpoint(store, manifest)
        if not self._may_be_renamed:
            self.fail(f"{folder} holds the manifest of {manifest.name}; give the folder that name", param, ctx)
        return OpenCheckpoint(store, manifest, folder.name)


class _WorkDirectory(click.ParamType[StoragePath]):
    """Click parameter type: the parent folder of checkpoints/."""

    name = "folder"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> StoragePath:
        path = _path(value)
        if isinstance(path, Path) and not path.is_dir():
            self.fail(f"{value} is no folder", param, ctx)
        return path


def _path(value: str) -> StoragePath:
    path = storage_path(value)
    return path if isinstance(path, ObjectPath) else path.resolve()


CHECKPOINT = _CheckpointFolder()


class Command(click.Command):
    """Command on a checkpoint. Exit code 1 for a corrupt checkpoint, 78 for every other error of this project."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (InvalidJobError, TrainingError) as error:
            raise _command_error(error) from error


def _command_error(error: Exception) -> CommandError:
    is_corrupt = isinstance(error, CorruptCheckpoint)
    return CommandError(str(error), ExitStatus.FAILED if is_corrupt else ExitStatus.INVALID_JOB)


@click.command(cls=Command)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--prompt", default="\n", help="Start of the text.")
@click.option(
    "--tokens",
    "count",
    default=300,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of tokens to generate.",
)
@click.option("--tokenizer", "path", help="tokenizer.json or its folder. Default: the job's.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Number that divides the logits. 0: always the likeliest token.",
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Choose among the likeliest tokens that together have this probability.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of the random choice of tokens.")
def sample(
    checkpoint: OpenCheckpoint,
    prompt: str,
    count: int,
    path: str | None,
    temperature: float,
    top_p: float,
    seed: int,
) -> None:
    """Print text generated by the model in the folder or s3:// URL CHECKPOINT."""
    from pseudoreal_trainer.data.tokenizer.saved import saved_tokenizer
    from pseudoreal_trainer.data.tokenizer.tokenizer import BYTES, load_tokenizer
    from pseudoreal_trainer.model.reference import Transformer, generate
    from pseudoreal_trainer.model.sampling import Sampling, readable
    from pseudoreal_trainer.training.start import load_weights

    manifest = checkpoint.manifest
    with saved_tokenizer(checkpoint.store.work_directory) as kept:
        if manifest.consumed is not None and path is None and kept is None:
            raise click.UsageError("the model was trained on token files; name their tokenizer with --tokenizer")
        tokenizer = load_tokenizer(path or kept or BYTES)
    if tokenizer.vocabulary > manifest.model.vocabulary_size:
        raise click.UsageError(
            f"the tokenizer has {tokenizer.vocabulary:,} tokens and the model {manifest.model.vocabulary_size:,}; give"
            " the one that made its token files"
        )
    tokens = tokenizer.encode(prompt).tolist()
    if not tokens:
        raise click.UsageError("the prompt is empty; give it a character at least")
    checkpoint.store.verify(manifest)
    model = Transformer(manifest.model, manifest.sharing)
    load_weights(model, checkpoint.reader)
    sampling = Sampling(tokenizer.vocabulary, temperature, top_p, seed)
    written = generate(model, tokens, count, manifest.model.sequence_length, sampling)
    click.echo(prompt + readable(tokenizer.decode(written)))


@click.command(cls=Command)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys are stable.")
def inspect(checkpoint: OpenCheckpoint, as_json: bool) -> None:
    """Show the contents of the checkpoint in the folder CHECKPOINT, and whether its files match their digests."""
    found = _description(checkpoint)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    readable = found | {"bytes": readable_bytes(found["bytes"]), "parameters": f"{found['parameters']:,}"}
    for key, value in readable.items():
        click.echo(f"{key.replace('_', ' '):16} {value}")


def _description(checkpoint: OpenCheckpoint) -> dict[str, Any]:
    manifest, reader = checkpoint.manifest, checkpoint.reader
    return {
        "step": manifest.step,
        "tokens": manifest.tokens,
        "phase": manifest.phase,
        "blocks": len(set(blocks_of_layers(manifest.sharing, manifest.model.layers))),
        "sets_of_experts": len(sets_of(experts_of_layers(manifest.sharing, manifest.model))),
        "layers": manifest.model.layers,
        "parameters": sum(prod(reader.shape(name)) for name in reader.names),
        "bytes": manifest.bytes,
        "files": len(manifest.files),
        "parent": manifest.parent,
        "verified": _find_corruption(checkpoint) is None,
        "optimizer_state": manifest.optimizer_state,
    }


@click.command(cls=Command)
@click.argument("checkpoint", type=_CheckpointFolder(may_be_renamed=True))
def verify(checkpoint: OpenCheckpoint) -> None:
    """Compare the files of the checkpoint in the folder CHECKPOINT with their digests. Exit code 1 if one differs."""
    fault = _find_corruption(checkpoint)
    if fault is not None:
        raise CommandError(f"{fault}{_last_good(checkpoint)}")
    files, size = len(checkpoint.manifest.files), readable_bytes(checkpoint.manifest.bytes)
    name = checkpoint.manifest.name
    click.echo(f"{checkpoint.renamed or name}: {files} files, {size}, all as the manifest says")
    if checkpoint.renamed is not None:
        click.echo(
            f"the folder's name differs from the manifest's, {name}: training and other commands need the folder under"
            " that name"
        )


def _find_corruption(checkpoint: OpenCheckpoint) -> CorruptCheckpoint | None:
    count = len(checkpoint.manifest.files)
    try:
        for part in _with_progress_bar(range(count), "verifying"):
            checkpoint.store.verify(checkpoint.manifest, part, count, renamed=checkpoint.renamed)
    except CorruptCheckpoint as error:
        return error
    return None


def _last_good(checkpoint: OpenCheckpoint) -> str:
    """Return a clause that names the checkpoint from which a resumed run would start, or says that the phase has no
    other sound checkpoint."""
    for head in checkpoint.store.candidates(checkpoint.manifest.phase):
        if head.name != checkpoint.manifest.name and _is_verified(checkpoint.store, head):
            return f"; the last good checkpoint of this phase is {head.name}"
    return "; no other checkpoint of this phase is sound"


def _is_verified(store: CheckpointStore, head: Head) -> bool:
    try:
        return _find_corruption(OpenCheckpoint(store, store.whole(head))) is None
    except CorruptCheckpoint:
        return False


def _phase_name(_: click.Context, __: click.Parameter, name: str) -> str:
    try:
        return TypeAdapter(DnsLabel).validate_python(name)
    except ValidationError:
        raise click.BadParameter(f"{name} is no name of a phase: small letters, digits and hyphens") from None


@click.command(cls=Command)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option(
    "--to", "phase", required=True, callback=_phase_name, help="Name of the phase that starts from the new checkpoint."
)
@click.option("--blocks", type=click.IntRange(min=1), help="Number of blocks of that phase. Default: one per layer.")
@click.option(
    "--pattern",
    type=click.Choice(["Cycle", "Segment"]),
    default="Cycle",
    show_default=True,
    help="Which block a layer uses, as in sharing.pattern of a phase.",
)
@click.option(
    "--part",
    type=click.Choice(get_args(SharedPart)),
    default="Blocks",
    show_default=True,
    help="What layers share, as in sharing.parts of a phase.",
)
@click.option(
    "--optimizer-state",
    type=click.Choice(get_args(OptimizerState)),
    default="Scale",
    show_default=True,
    help="Moments of the copies, as in spec.delink.optimizerState.",
)
@click.option(
    "--materialize",
    "as_files",
    is_flag=True,
    help="Write the tensors into files of the new checkpoint, instead of references.",
)
def delink(
    checkpoint: OpenCheckpoint,
    phase: str,
    blocks: int | None,
    pattern: Any,
    part: SharedPart,
    optimizer_state: OptimizerState,
    as_files: bool,
) -> None:
    """Give the layers of the checkpoint in the folder CHECKPOINT blocks of their own.

    Writes a manifest beside it that refers to its files; no weights are copied.
    """
    sharing = Sharing(blocks=blocks or checkpoint.manifest.model.layers, pattern=pattern, parts=[part])
    try:
        manifest = delinked(checkpoint.manifest, phase, Target(sharing), optimizer_state)
        check_absent(checkpoint.store.folder / manifest.name)
        checkpoint.store.verify(checkpoint.manifest)
        target = checkpoint.store.begin(manifest)
        if as_files:
            manifest = materialize(checkpoint.store.reader(manifest), target, _with_progress_bar)
        checkpoint.store.commit(manifest)
    except ValueError as error:
        raise _command_error(error) from error
    click.echo(str(target))


def _file_size(_: click.Context, __: click.Parameter, text: str) -> int:
    try:
        found = bytes_of(TypeAdapter(Quantity).validate_python(text))
    except ValueError as error:
        raise click.BadParameter(f"{text} is no number of bytes such as 5G or 500M") from error
    if found < 1:
        raise click.BadParameter("a file has at least one byte")
    return found


def _tokenizer_file(_: click.Context, __: click.Parameter, text: str | None) -> Source | None:
    if text is None:
        return None
    if text == "bytes":
        return "bytes"
    file = tokenizer_file(Path(text))
    if not file.is_file():
        raise click.BadParameter(f"there is no {file}")
    return file


@click.command(cls=Command)
@click.argument("checkpoint", type=CHECKPOINT)
@click.option("--format", "name", type=click.Choice([*FORMATS]), required=True, help="Format of the files.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder to create.")
@click.option("--dtype", type=click.Choice(["bfloat16", "float32"]), help="Default: the checkpoint's own, float32.")
@click.option("--file-size", default="5G", show_default=True, callback=_file_size, help="Maximum size of a file.")
@click.option("--tokenizer", callback=_tokenizer_file, help="tokenizer.json, its folder, or bytes. Default: the job's.")
def export(
    checkpoint: OpenCheckpoint,
    name: str,
    output: Path,
    dtype: str | None,
    file_size: int,
    tokenizer: Source | None,
) -> None:
    """Write the weights of the checkpoint in the folder CHECKPOINT for other programs.

    huggingface: a folder that transformers loads as a model of its own, tokenizer included; --dtype, --file-size and
    --tokenizer are for this format. safetensors: one file with the tensors under their own names. dcp: a folder for
    torch.distributed.checkpoint.
    """
    options = Options(dtype, file_size, tokenizer)
    if name != "huggingface" and options != Options():
        raise click.UsageError("--dtype, --file-size and --tokenizer are for --format huggingface")
    try:
        export_checkpoint(checkpoint.store, checkpoint.manifest, name, output, options, _with_progress_bar)
    except (ValueError, OSError, TrainingError) as error:
        raise _command_error(error) from error
    if name == "huggingface" and not (output / TOKENIZER_FILE).exists():
        click.echo("no tokenizer is written: give that of the token files, by --tokenizer", err=True)
    click.echo(str(output))


@click.command(cls=Command)
@click.argument("workdir", type=_WorkDirectory())
@click.option("--keep-last", type=click.IntRange(min=1), required=True, help="Number of newest checkpoints to keep.")
@click.option("--keep-every", type=click.IntRange(min=1), help="Also keep each multiple of this number of steps.")
@click.option("--dry-run", is_flag=True, help="Only print which checkpoints would be removed.")
def prune(workdir: StoragePath, keep_last: int, keep_every: int | None, dry_run: bool) -> None:
    """Remove old checkpoints of the job in WORKDIR. The first and last ones of each phase, and those to which others
    refer, always stay."""
    folder = workdir / "checkpoints"
    jobs = {head.job.uid: head.job.name for head in HeadCache(folder).all()}
    if len(jobs) > 1:
        named = ", ".join(f"{name} (uid {uid})" for uid, name in sorted(jobs.items(), key=lambda job: job[::-1]))
        raise CommandError(
            f"{folder} has checkpoints of {len(jobs)} jobs: {named}; nothing is removed; move those of each job into a"
            " work directory of its own, and prune that",
            ExitStatus.INVALID_JOB,
        )
    store = CheckpointStore(workdir, next(iter(jobs), None))
    if dry_run:
        names = [head.name for head in removable(store.committed(), keep_last, keep_every, [])]
    else:
        names = store.prune(keep_last, keep_every)
    for name in names:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")


def _with_progress_bar(items: Any, what: str) -> Any:
    # On stderr, because stdout may go to another program.
    console = Console(stderr=True)
    return track(items, what, console=console, transient=True, disable=not console.is_terminal)
