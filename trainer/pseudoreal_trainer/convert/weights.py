"""The tensors of a Hugging Face checkpoint, under our names. A missing, misshapen or unknown tensor is an error; only
tensors that follow from others (rotary frequencies, a tied head) may be left over."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import structlog
from pseudoreal_api.resolved.layers import experts_of_layers, first_layers, groups_of_layers, sets_of
from pseudoreal_api.spec.checkpoint import BlockOrigins
from pseudoreal_api.spec.model import Model
from pseudoreal_api.spec.phase import Sharing

from pseudoreal_trainer.checkpoint.precision import Array, empty, widen
from pseudoreal_trainer.checkpoint.tensor_file import TensorFile
from pseudoreal_trainer.convert.architectures import HEAD, Architecture, Places, architecture_of
from pseudoreal_trainer.convert.facts import Facts, differences, facts_of
from pseudoreal_trainer.convert.published_config import published_facts, trained_length
from pseudoreal_trainer.convert.selection import Layers, adds_layers, layers_of_blocks, origins_of_layers
from pseudoreal_trainer.errors import InvalidJobError, NotExportable, TrainingError, UnfitWeights
from pseudoreal_trainer.plan.parts import by_expert
from pseudoreal_trainer.plan.units import are_experts, block_of, in_block, units_of
from pseudoreal_trainer.storage.path import StoragePath
from pseudoreal_trainer.storage.storage import storage_of

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_COMPUTED = ".rotary_emb.inv_freq"
"""Suffix of tensors that older releases of transformers saved and that follow from the config."""
_MOST_NAMED = 5
"""Maximum number of tensors named in a message."""

Theirs = tuple[str, ...]
"""`transformers` names of tensors; their mean is the initial value of one of our tensors, or of one expert's part."""

log = structlog.get_logger()


def open_weights(folder: StoragePath, model: Model, sharing: Sharing, origins: BlockOrigins) -> "Weights":
    """Open the weights in the folder for the blocks of a phase. Raises InvalidJobError if they do not fit the model."""
    with _refusing(folder):
        config = _json(folder / CONFIG)
        facts = published_facts(config)
        published = first_layers(model, min(model.layers, facts["layers"])) if adds_layers(origins) else model
        if clauses := differences(facts_of(published), facts):
            raise UnfitWeights(f"{'; '.join(clauses)}; make spec.model say what config.json does{_hint(model, facts)}")
        architecture = _architecture(published, config)
        blocks = layers_of_blocks(origins, published, model, sharing)
        sources = _sources(architecture, published, model, sharing, origins, blocks)
        weights = Weights(folder, config, model.sequence_length, _shapes(published, architecture), sources, blocks)
        weights.check_names()
        return weights


def _hint(model: Model, published: Facts) -> str:
    """Return how to use weights with fewer layers; empty for as many or more."""
    if published["layers"] >= model.layers:
        return ""
    return ", or spec.checkpoint.startFrom.blocks.type Stack or Interleave, with which layers begin as others"


@dataclass(frozen=True)
class Weights:
    """The tensors of a folder. A rank opens only the files that it reads from, and reads only their headers and the
    requested elements."""

    folder: StoragePath
    config: dict[str, Any]
    """Content of config.json."""
    sequence_length: int
    """Number of tokens in a sequence of the job."""
    shapes: Mapping[str, tuple[int, ...]]
    """`transformers` name of each required tensor -> shape."""
    sources: Mapping[str, tuple[Theirs, ...]]
    """Our name of each tensor of the phase -> the tensors from which it starts: one mean, or one per expert."""
    blocks: tuple[tuple[int, ...], ...]
    """For each block, or for each set of experts if layers share only experts, the layers that are averaged into its
    initial weights."""

    def read(self, name: str, begin: int, end: int, dtype: str) -> Array:
        """Return elements begin..end-1 of one of our flattened tensors. Raises InvalidJobError."""
        with _refusing(self.folder):
            sources = self.sources[name]
            size = prod(self.shapes[sources[0][0]])
            parts = [
                self._mean(sources[number], elements.start - number * size, elements.stop - number * size, dtype)
                for number, elements in by_expert(begin, end, size)
            ]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _mean(self, theirs: Theirs, begin: int, end: int, dtype: str) -> Array:
        first, *others = (self._read(name, begin, end, dtype) for name in theirs)
        if not others:
            return first
        # Float64 sums of equal float32 numbers are exact, so the mean of equal numbers is the number itself.
        total = sum((each.astype(np.float64) for each in others), first.astype(np.float64))
        return np.asarray(total / (1 + len(others))).astype(dtype)

    def check(self) -> None:
        """Open all files and check the headers of all tensors; warn of settings that are allowed but rarely intended.
        Called by one rank for all. Raises InvalidJobError."""
        with _refusing(self.folder):
            for file in sorted({*self._places.values()}):
                self._file(file)
            self._warn_of_means()
            self._warn_of_length()

    def _warn_of_means(self) -> None:
        if any(len(layers) > 1 for layers in self.blocks):
            log.warning(
                "layers_averaged",
                blocks=[[*layers] for layers in self.blocks],
                why="layers that were not trained from a common block have their attention heads and neurons in"
                " different orders, so the mean of such layers is not a useful layer; compare the first validation loss"
                " with the one of spec.checkpoint.startFrom.blocks.type Evenly, and keep the type with the lower loss",
            )

    def _warn_of_length(self) -> None:
        """Warn if the job's sequences are longer than the weights were trained on. Training is still possible: rotary
        positions continue past the last trained position."""
        trained = trained_length(self.config)
        if self.sequence_length > trained:
            log.warning(
                "sequences_longer_than_trained",
                sequence_length=self.sequence_length,
                trained_length=trained,
                why="config.json says that the weights were trained on sequences of at most trained_length tokens, so"
                " losses at later rotary positions are high at first; lower spec.model.sequenceLength to"
                " trained_length, or scale the rotary positions by the same values in config.json and in"
                " spec.model.attention.rotary.scaling",
            )

    def check_names(self) -> None:
        """Raise UnfitWeights if a tensor is missing or has no place in the model."""
        found = self._places.keys()
        if missing := [name for name in self.shapes if name not in found]:
            raise UnfitWeights(f"the tensors {_listed(missing)} are missing")
        if foreign := sorted(name for name in found - self.shapes.keys() if not self._is_implied(name)):
            raise UnfitWeights(
                f"the tensors {_listed(foreign)} have no place in the model, so that it would not compute what it was"
                " trained to"
            )

    def _is_implied(self, name: str) -> bool:
        """Return True if the tensor follows from others. A head beside tied embeddings is compared with the embedding
        when the embedding is read."""
        return name.endswith(_COMPUTED) or name == HEAD

    def _read(self, theirs: str, begin: int, end: int, dtype: str) -> Array:
        found = self._stored(theirs, begin, end, dtype)
        if self._has_copy(theirs) and not np.array_equal(found, self._stored(HEAD, begin, end, dtype), equal_nan=True):
            raise UnfitWeights(
                f"{HEAD} differs from {theirs}, and config.json says that they are one; remove one of them"
            )
        return found

    def _has_copy(self, theirs: str) -> bool:
        """Return True if the tensor is a tied embedding that was saved a second time as the head."""
        return "head.weight" not in self.sources and HEAD in self._places and theirs == self._embedding

    @property
    def _embedding(self) -> str:
        return self.sources["embedding.weight"][0][0]

    def _stored(self, theirs: str, begin: int, end: int, dtype: str) -> Array:
        file = self._file(self._places[theirs])
        form = file.form(theirs)
        if form.dtype == "float64" and dtype != "float64":
            raise UnfitWeights(f"{theirs} is float64, and would be rounded; save the weights in float32")
        numbers = empty(end - begin, form.dtype)
        file.bytes_into(theirs, begin, numbers)
        found = widen(numbers, form.dtype, dtype)
        if not (are_numbers := np.isfinite(found)).all():
            element = begin + int(are_numbers.argmin())
            raise UnfitWeights(
                f"element {element:,} of {theirs} is {found[element - begin]}; take weights that are numbers"
            )
        return found

    @cached_property
    def _places(self) -> dict[str, str]:
        """`transformers` name of each tensor in the folder -> file, from the index; without an index, all are in one
        file. If both exist, the single file is used, as in transformers."""
        if storage_of(self.folder / SINGLE).exists():
            return dict.fromkeys(_opened(self.folder / SINGLE).names, SINGLE)
        index = _json(self.folder / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(f, str) and "/" not in f for f in index.values()):
            raise UnfitWeights(f"{INDEX} has no weight_map that names a file of the folder for each tensor")
        return index

    def _file(self, name: str) -> TensorFile:
        if name not in self._files:
            file = _opened(self.folder / name)
            self._check_file(name, file)
            self._files[name] = file
        return self._files[name]

    @cached_property
    def _files(self) -> dict[str, TensorFile]:
        return {}

    def _check_file(self, name: str, file: TensorFile) -> None:
        """Raise UnfitWeights if the file contradicts the index or the model."""
        size = storage_of(file.path).size()
        found, expected = {*file.names}, {tensor for tensor, place in self._places.items() if place == name}
        if found != expected:
            raise UnfitWeights(f"{name} and {INDEX} do not agree on the tensors {_listed(sorted(found ^ expected))}")
        shapes = {HEAD: self.shapes[self._embedding], **self.shapes}
        for tensor in sorted(found & shapes.keys()):
            if (shape := file.form(tensor).shape) != shapes[tensor]:
                raise UnfitWeights(f"{tensor} has the shape {[*shape]}, and in the model {[*shapes[tensor]]}")
            if file.end(tensor) > size:
                raise UnfitWeights(
                    f"{name} has {size:,} bytes, and {tensor} ends behind them: it is cut short; restore it"
                )


def _architecture(model: Model, config: Mapping[str, Any]) -> Architecture:
    try:
        architecture = architecture_of(model, config["model_type"])
    except NotExportable as error:
        raise UnfitWeights(str(error)) from error
    named = config.get("architectures") or [architecture.class_name]
    if named != [architecture.class_name]:
        raise UnfitWeights(
            f"config.json has the architectures {named}; the one that can be read is {architecture.class_name}"
        )
    return architecture


def _shapes(model: Model, architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Return `transformers` names -> shapes."""
    units = units_of(model, Sharing(blocks=model.layers))
    shapes = {parameter.name: parameter.whole for unit in units for parameter in unit.parameters}
    names = _names(model, architecture)
    assert {ours.name for ours in names.values()} == shapes.keys(), "the table names every tensor of the model"
    return {theirs: ours.shape(shapes[ours.name]) for theirs, ours in names.items()}


def _names(model: Model, architecture: Architecture) -> Places:
    """Return `transformers` names -> our counterparts, for a model in which each layer has its own block and
    experts."""
    sharing = Sharing(blocks=model.layers)
    return architecture.names(model, range(model.layers), experts_of_layers(sharing, model))


def _sources(
    architecture: Architecture,
    published: Model,
    model: Model,
    sharing: Sharing,
    origins: BlockOrigins,
    of_blocks: tuple[Layers, ...],
) -> dict[str, tuple[Theirs, ...]]:
    """Return our names -> `transformers` names. `of_blocks`: for each block, or each set of experts, the layers from
    which it starts."""
    # Names of a stacked tensor's parts are in the order of its experts.
    theirs: dict[str, list[str]] = {}
    for name, place in _names(published, architecture).items():
        theirs.setdefault(place.name, []).append(name)
    found: dict[str, tuple[Theirs, ...]] = {
        ours: tuple((name,) for name in names) for ours, names in theirs.items() if block_of(ours) is None
    }
    blocks = experts = dict(enumerate(of_blocks))
    if sharing.shares_experts_alone:
        groups, numbers = groups_of_layers(sharing, model.layers), sets_of(experts_of_layers(sharing, model))
        blocks = {layer: (source,) for layer, source in enumerate(origins_of_layers(origins, published, model))}
        experts = {number: of_blocks[groups[number]] for number in numbers}
    for names, begin_as in (
        ([name for name in theirs if not are_experts(name)], blocks),
        ([name for name in theirs if are_experts(name)], experts),
    ):
        for number, layers in begin_as.items():
            for ours in [name for name in names if block_of(name) == layers[0]]:
                found[in_block(ours, number)] = tuple(zip(*(theirs[in_block(ours, i)] for i in layers), strict=True))
    return found


@contextmanager
def _refusing(folder: StoragePath) -> Iterator[None]:
    """Translate errors, and name the folder in them: InvalidJobError for errors that the user must fix, TrainingError
    for errors that may disappear."""
    try:
        yield
    except FileNotFoundError as error:
        raise InvalidJobError(f"spec.checkpoint.startFrom: {folder} is no Hugging Face checkpoint: {error}") from error
    except OSError as error:
        raise TrainingError(f"the weights in {folder} cannot be read: {error}") from error
    except ValueError as error:
        raise InvalidJobError(f"spec.checkpoint.startFrom: the weights in {folder} do not fit: {error}") from error


def _json(path: StoragePath) -> dict[str, Any]:
    try:
        found = json.loads(storage_of(path).read())
    except (ValueError, RecursionError) as error:
        raise UnfitWeights(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise UnfitWeights(f"{path.name} is no JSON object")
    return found


def _opened(path: StoragePath) -> TensorFile:
    try:
        return TensorFile(path)
    except ValueError as error:
        raise UnfitWeights(f"{path.name} is no safetensors file: {error}") from error


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
