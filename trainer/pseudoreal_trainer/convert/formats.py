"""The formats of `pseudoreal export`."""

from collections.abc import Callable
from math import prod
from pathlib import Path

from pseudoreal_trainer.checkpoint.materialize import Tracked
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorWriter
from pseudoreal_trainer.convert.huggingface import Options, write_huggingface


def write_safetensors(source: Reader, folder: Path, tracked: Tracked[str], _: Options) -> None:
    names = list(source.names)
    writer = TensorWriter(folder / "model.safetensors", {n: Form(source.shape(n), source.dtype) for n in names})
    for name in tracked(names, "writing"):
        for numbers in source.chunks(name, "weights", 0, prod(source.shape(name))):
            writer.append(numbers)
    writer.finish()


def write_dcp(source: Reader, folder: Path, tracked: Tracked[str], _: Options) -> None:
    """Write a folder for torch.distributed.checkpoint. Its index is a pickle, as the format requires; this project
    itself reads no pickle."""
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    weights = {name: torch.from_numpy(source.tensor(name)) for name in tracked(list(source.names), "reading")}
    save(weights, storage_writer=FileSystemWriter(folder), no_dist=True)


FORMATS: dict[str, Callable[[Reader, Path, Tracked[str], Options], None]] = {
    "huggingface": write_huggingface,
    "safetensors": write_safetensors,
    "dcp": write_dcp,
}
