"""The commands `pseudoreal data train-tokenizer`, `prepare` and `inspect`."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from pseudoreal_api.quantity import readable_bytes
from rich.console import Console

from pseudoreal_trainer.cgroups import usable_processors
from pseudoreal_trainer.cli.data_progress import PrepareDisplay, sampling_progress
from pseudoreal_trainer.data.prepare.inputs import KINDS, REMOTE_KINDS, find_inputs
from pseudoreal_trainer.data.prepare.prepare import Prepared, prepare
from pseudoreal_trainer.data.prepare.sample import sampled_texts
from pseudoreal_trainer.data.prepare.settings import SHARD_BYTES, Settings
from pseudoreal_trainer.data.tokenizer.tokenizer import BYTES, TOKENIZER_FILE, load_tokenizer
from pseudoreal_trainer.data.tokenizer.train import LEAST_VOCABULARY, train_tokenizer, write_tokenizer
from pseudoreal_trainer.data.tokens.inspection import Inspection, first_documents, inspect, verify
from pseudoreal_trainer.data.tokens.native import MOST_SHARD_BYTES
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.logs import configure_logs

_SAMPLE_BYTES = 1 << 30
_SHOWN_TOKENS = 100
"""Maximum number of tokens shown per document."""


@click.group()
def data() -> None:
    """Text to tokens: train a tokenizer, prepare token files, inspect them."""
    configure_logs(sys.stderr)  # standard output is for results


_INPUTS = click.argument("inputs", nargs=-1, required=True)
_FIELD = click.option("--text-field", default="text", show_default=True, help="Field or column that holds the text.")
_TOKENIZER_HELP = f"A {TOKENIZER_FILE}, a folder that holds one, or `{BYTES}`."


@data.command("train-tokenizer")
@_INPUTS
@click.option("--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write.")
@click.option("--vocabulary-size", required=True, type=click.IntRange(min=LEAST_VOCABULARY), help="Number of tokens.")
@_FIELD
@click.option(
    "--sample-bytes",
    default=_SAMPLE_BYTES,
    show_default=True,
    type=click.IntRange(min=1),
    help="Maximum size of the sample, in bytes.",
)
def train(inputs: tuple[str, ...], output: Path, vocabulary_size: int, text_field: str, sample_bytes: int) -> None:
    """Train a byte-level BPE on a sample of the text in INPUTS.

    INPUTS are as for `pseudoreal data prepare`. The same inputs give the same tokenizer, byte for byte.
    """
    if (output / TOKENIZER_FILE).exists():
        raise InvalidJobError(f"{output / TOKENIZER_FILE} exists, and is not replaced: token files depend on it")
    found = find_inputs(inputs)
    with sampling_progress(Console(stderr=True), min(sample_bytes, sum(each.size for each in found))) as tick:
        tokenizer = train_tokenizer(sampled_texts(found, text_field, sample_bytes, tick), vocabulary_size)
    write_tokenizer(output, tokenizer)
    size = len(json.loads(tokenizer)["model"]["vocab"])
    fewer = "" if size == vocabulary_size else f" ({vocabulary_size:,} were asked for; the text has no more pairs)"
    click.echo(f"{output / TOKENIZER_FILE}: {size:,} tokens{fewer}")


_PREPARE_HELP = f"""Turn the text in INPUTS into token files in a folder.

INPUTS are files and folders: {KINDS}. They may be under a URL, with wildcards: hf://datasets/OWNER/NAME[@REVISION]/PATH,
s3://, gs://, az:// and https://; from there, {REMOTE_KINDS}. An interrupted run continues where it ended when it is
started again.
"""


@data.command("prepare", help=_PREPARE_HELP)
@_INPUTS
@click.option("--output", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder to write.")
@click.option("--tokenizer", required=True, help=_TOKENIZER_HELP)
@click.option(
    "--end-of-document",
    type=click.IntRange(min=0),
    help="Number of the token that ends documents. Default: the one that the files beside the tokenizer name.",
)
@_FIELD
@click.option(
    "--pack",
    type=(click.Choice(["best-fit"]), click.IntRange(min=2)),
    metavar="best-fit SEQUENCE",
    help="Order documents so that rows of SEQUENCE tokens cut as few of them as possible.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), help="Maximum number of processes. Default: one per usable processor."
)
@click.option(
    "--shard-bytes",
    default=SHARD_BYTES,
    show_default=True,
    type=click.IntRange(min=1, max=MOST_SHARD_BYTES // 2),
    help="Size of a shard. Each process has one shard in memory.",
)
@click.option(
    "--most-malformed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Number of malformed documents that may be skipped in an input, or in several small inputs together.",
)
def prepare_command(
    inputs: tuple[str, ...],
    output: Path,
    tokenizer: str,
    end_of_document: int | None,
    text_field: str,
    pack: tuple[str, int] | None,
    workers: int | None,
    shard_bytes: int,
    most_malformed: int,
) -> None:
    settings = Settings(
        text_field=text_field,
        shard_bytes=shard_bytes,
        sequence=pack[1] if pack else None,
        most_malformed=most_malformed,
    )
    processes = workers or usable_processors()
    with PrepareDisplay(Console(stderr=True)) as display:
        done = prepare(inputs, output, tokenizer, end_of_document, settings, processes, display.tick)
    click.echo(f"{output}: {_summary(done)}")


def _summary(done: Prepared) -> str:
    index = done.index
    said = [
        f"{index.tokens:,} tokens",
        f"{index.documents - done.padding:,} documents",
        f"{readable_bytes(index.text_bytes)} of text",
        f"{len(index.shards):,} shards",
    ]
    if done.padding:
        said.append(f"{done.padding / index.tokens:.3%} padding")
    if done.malformed:
        said.append(f"{done.malformed:,} malformed documents left out")
    return ", ".join(said)


@data.command("inspect")
@click.argument("path", type=click.Path(path_type=Path, exists=True))
@click.option("--tokenizer", help=f"{_TOKENIZER_HELP} With it, the first documents are shown.")
@click.option("--end-of-document", type=click.IntRange(min=0), help="As for `pseudoreal data prepare`.")
@click.option(
    "--dtype",
    type=click.Choice(["uint8", "uint16", "uint32", "int32", "int64"]),
    help="Integer type of bare tokens.",
)
@click.option(
    "--documents", default=3, show_default=True, type=click.IntRange(min=1), help="Number of documents to show."
)
@click.option("--verify", "is_verified", is_flag=True, help="Read all tokens, and compare digests if there are any.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys are stable.")
def inspect_command(
    path: Path,
    tokenizer: str | None,
    end_of_document: int | None,
    dtype: str | None,
    documents: int,
    is_verified: bool,
    as_json: bool,
) -> None:
    """Show the contents of the token files at PATH.

    PATH is a folder of `pseudoreal data prepare`, Megatron-LM's X.idx, nanotron's X.ds, a .npy, or bare tokens.
    """
    found = inspect(path, dtype, documents)
    if is_verified:
        verify(path)
    facts = _facts(found)
    texts = _first_texts(found, tokenizer, end_of_document, documents) if tokenizer else []
    if as_json:
        click.echo(json.dumps(facts | {"first_documents": texts}, indent=2))
        return
    for key, value in facts.items():
        click.echo(f"{key.replace('_', ' '):16} {value:,}" if isinstance(value, int) else f"{key:16} {value}")
    for text in texts:
        click.echo(f"---\n{text}")


def _facts(found: Inspection) -> dict[str, Any]:
    files = found.files
    facts = {
        "format": found.format,
        "dtype": ", ".join(sorted({str(run.dtype) for run in files.runs})),
        "tokens": files.tokens,
        **found.facts,
        "vocabulary": files.vocabulary,
        "end_of_document": files.end_of_document,
        "tokenizer": files.tokenizer,
        "packed_for": files.sequence,
    }
    return {key: value for key, value in facts.items() if value is not None}


def _first_texts(found: Inspection, path: str, end_of_document: int | None, count: int) -> list[str]:
    files = found.files
    tokenizer = load_tokenizer(path, files.end_of_document if end_of_document is None else end_of_document)
    if files.tokenizer not in (None, tokenizer.sha256):
        raise InvalidJobError(f"{path} is not the tokenizer of these files: its SHA-256 is {tokenizer.sha256}")
    shown = first_documents(found, count, tokenizer.end_of_document, _SHOWN_TOKENS)
    return [tokenizer.decode(tokens.astype(np.uint32)) for tokens in shown]
