"""A corpus of token files: the training sources, and the sets for validation losses."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_api.spec.data import TokenFiles as Spec

from pseudoreal_trainer.data.corpus import Corpus, CorpusIdentity, load_corpus
from pseudoreal_trainer.data.identity import joined_identity, token_identity
from pseudoreal_trainer.data.sources import Source, open_source
from pseudoreal_trainer.data.tokenizer.tokenizer import BYTES, ByteTokenizer, Tokenizer, load_tokenizer
from pseudoreal_trainer.data.tokens.formats import check_ends, token_files
from pseudoreal_trainer.data.tokens.reader import Tokens
from pseudoreal_trainer.data.tokens.runs import TokenFiles
from pseudoreal_trainer.errors import InvalidJobError
from pseudoreal_trainer.storage.path import StoragePath, is_object, storage_path

_PATTERNS = {"Native": "", "Megatron": "**/*.bin", "Nanotron": "**/*.ds", "NumPy": "**/*.npy", "Raw": "**/*.bin"}


@dataclass(frozen=True)
class TokenCorpus:
    sources: Mapping[str, Source]
    sets: Mapping[str, Tokens]
    """Name of a validation set -> its windows, [W, T + 1]. The loss of the first set is the job's validation loss."""
    tokenizer: Tokenizer | None
    """The tokenizer of all sources; None: the job does not name it."""
    identity: CorpusIdentity
    """The identity of the sources. Validation sets are not included, because they do not affect the weights."""
    end_of_document: int | None = None
    """The token that ends documents, if attention stays within documents; None: attention covers whole sequences."""
    packed: tuple[str, ...] = ()
    """Names of the sources and sets with documents packed into rows."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all sources."""
        return sum(source.reader.tokens for source in self.sources.values())


def open_corpus(config: PhaseConfig) -> Corpus | TokenCorpus:
    """Return the text or the token files of a job. Raises InvalidJobError if something is missing or damaged."""
    if not config.data.sources:
        return load_corpus(config.data, config.model.sequence_length)
    files = {source.name: _files(config, source) for source in config.data.sources}
    sets = {each.name: _files(config, each) for each in config.data.validation.sets}
    specified: list[tuple[Spec, TokenFiles]] = [(source, files[source.name]) for source in config.data.sources]
    specified += [(each, sets[each.name]) for each in config.data.validation.sets]
    most, tokenizer = config.data.validation.sequences, _tokenizer(config, files | sets)
    return TokenCorpus(
        sources={name: _open(config, name, found) for name, found in files.items()},
        sets={name: _windows(_open(config, name, found), most) for name, found in sets.items()},
        tokenizer=tokenizer,
        identity=joined_identity({name: token_identity(found) for name, found in files.items()}),
        end_of_document=_end_of_document(config, specified, tokenizer),
        packed=tuple(spec.name for spec, found in specified if found.sequence is not None),
    )


def end_of_document_of(corpus: Corpus | TokenCorpus) -> int | None:
    """Return the token that ends documents, if attention stays within them; None: attention covers whole sequences."""
    return corpus.end_of_document if isinstance(corpus, TokenCorpus) else None


def _end_of_document(
    config: PhaseConfig, files: Sequence[tuple[Spec, TokenFiles]], tokenizer: Tokenizer | None
) -> int | None:
    """Return the token that ends the documents of all files; None if documents are not masked. The files' own statement
    takes precedence, then the job's, then the tokenizer's. Raises InvalidJobError if none states the token, if two
    differ, or if documents end with another token."""
    if config.data.documents.masking == "None":
        return None
    named = config.data.documents.end_token
    assumed = named if named is not None or tokenizer is None else tokenizer.end_of_document
    stated = [(spec.name, assumed if found.end_of_document is None else found.end_of_document) for spec, found in files]
    end = _common([*stated, ("spec.data.documents.endToken", stated[0][1] if named is None else named)])
    for spec, found in files:
        check_ends(spec.format, found, end)
    return end


def _common(stated: Sequence[tuple[str, int | None]]) -> int:
    """Return the end token that all statements agree on. Raises InvalidJobError if one is missing, or two differ.
    `stated`: for each statement, the name of its origin, and the token; None: not stated."""
    first, end = stated[0]
    for name, other in stated:
        if other is None or end is None:
            raise InvalidJobError(
                f"the files of {name} do not say which token ends documents, which spec.data.documents.masking needs;"
                " name it by spec.data.documents.endToken, or name their tokenizer by spec.data.tokenizer"
            )
        if other != end:
            raise InvalidJobError(
                f"documents end with the token {end} by {first}, and with {other} by {name}; prepare all files with one"
                " tokenizer, and name no other end"
            )
    assert end is not None, "the loop raises for a missing end token"
    return end


def _tokenizer(config: PhaseConfig, files: Mapping[str, TokenFiles]) -> Tokenizer | None:
    """Return the tokenizer that the job names. If the job names none: the byte tokenizer if all files state it, else
    None."""
    path, end = config.data.tokenizer.path, _stated_end(config, files.values())
    if path is None:
        are_bytes = all(found.tokenizer == ByteTokenizer().sha256 for found in files.values())
        return load_tokenizer(BYTES, end) if are_bytes else None
    tokenizer = load_tokenizer(Path(config.data.path) / path, end)
    others = [name for name, found in files.items() if found.tokenizer not in (None, tokenizer.sha256)]
    if others:
        raise InvalidJobError(
            f"{others[0]} was prepared with another tokenizer than spec.data.tokenizer.path {path}, which has the"
            f" SHA-256 {tokenizer.sha256[:16]}…; prepare it with this one, or name the other"
        )
    if tokenizer.vocabulary > config.model.vocabulary_size:
        raise InvalidJobError(
            f"spec.model.vocabularySize {config.model.vocabulary_size} must be at least {tokenizer.vocabulary}, the"
            f" number of tokens of spec.data.tokenizer.path {path}"
        )
    return tokenizer


def _stated_end(config: PhaseConfig, files: Iterable[TokenFiles]) -> int | None:
    """Return the token that ends documents as stated by the files, else by the job: files may have been prepared with
    another end than the tokenizer's. None: neither states it."""
    stated = (found.end_of_document for found in files if found.end_of_document is not None)
    return next(stated, config.data.documents.end_token)


def _files(config: PhaseConfig, spec: Spec) -> TokenFiles:
    pattern = spec.pattern or _PATTERNS[spec.format]
    return token_files(spec.format, _folder(config, spec), pattern, spec.dtype)


def _folder(config: PhaseConfig, spec: Spec) -> StoragePath:
    path = spec.path or spec.name
    return storage_path(path) if is_object(path) else Path(config.data.path) / path


def _open(config: PhaseConfig, name: str, files: TokenFiles) -> Source:
    model, data = config.model, config.ranks // config.parallelism.pipeline
    return open_source(
        name,
        files,
        sequence=model.sequence_length,
        vocabulary=model.vocabulary_size,
        seed=config.data.seed,
        ranks=data,
        sources=len(config.data.sources),
    )


def _windows(source: Source, most: int) -> Tokens:
    """Return at most `most` windows for validation, [W, T + 1], in memory. Closes the files of the source."""
    try:
        return source.spread(most)
    finally:
        source.reader.close()
