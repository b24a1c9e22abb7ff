"""Files that are truncated, fail or exist already, on file systems with missing features."""

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from pseudoreal_trainer.checkpoint.reader import Reader
from pseudoreal_trainer.checkpoint.tensor_file import Form, TensorFile, TensorWriter
from pseudoreal_trainer.storage import durable, files
from pseudoreal_trainer.storage.files import FileOutput, FileStorage
from pseudoreal_trainer.training.start import load_weights

from tests.support.checkpoints import newest_of
from tests.support.patience import PATIENCE_SECONDS

ELEMENTS = 1 << 18


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    path = tmp_path / "weights.safetensors"
    writer = TensorWriter(path, {"a": Form((ELEMENTS,), "float32")})
    writer.append(np.arange(ELEMENTS, dtype=np.float32))
    writer.finish()
    return path


def test_a_file_that_is_cut_while_it_is_read_is_an_error_with_its_name(tensors: Path) -> None:
    file, out = TensorFile(tensors), np.empty(ELEMENTS // 2, np.float32)
    file.read_into("a", 1000, out)
    assert out.tolist() == [*range(1000, 1000 + len(out))]
    os.truncate(tensors, 4096)
    with pytest.raises(ValueError, match=rf"{tensors} ends before byte .*: it was cut; restore it"):
        file.read_into("a", ELEMENTS // 2, out)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_fails_is_an_error_with_the_files_name(
    number: int, tensors: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = TensorFile(tensors)

    def fails(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", fails)
    with pytest.raises(OSError, match=rf"\[Errno {number}\] {os.strerror(number)}: '{tensors}'"):
        file.read_into("a", 0, np.empty(8, np.float32))


def test_a_read_that_brings_less_than_was_asked_for_goes_on(tensors: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, out = os.preadv, np.empty(ELEMENTS, np.float32)
    monkeypatch.setattr(os, "preadv", lambda file, views, begin: read(file, [views[0][:60_001]], begin))
    TensorFile(tensors).read_into("a", 0, out)
    assert out.tolist() == [*range(ELEMENTS)]


def test_a_header_that_is_nested_too_deep_is_an_error_with_the_files_name(tmp_path: Path) -> None:
    header = b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    (tmp_path / "deep.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"deep\.safetensors is not a safetensors file: its header"):
        TensorFile(tmp_path / "deep.safetensors")


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": ["0", "8"]},
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [0.5, 8]},
        {"data_offsets": [False, 8]},
        {"data_offsets": [-8, 0]},
        {"data_offsets": [None, 8]},
        {"data_offsets": "08"},
        {"data_offsets": [0, 1e400]},
        {"shape": ["2"]},
        {"shape": "2"},
        {"shape": [2.0]},
        {"shape": [2, True]},
        {"shape": [-1, -2]},
    ],
    ids=str,
)
def test_sizes_and_offsets_that_are_no_whole_numbers_are_an_error_with_the_tensors_name(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    file, out = TensorFile(path), np.empty(2, np.float32)
    says = r"^odd\.safetensors has a header without sense, of a: sizes and offsets must be whole numbers$"
    for read in (lambda: file.form("a"), lambda: file.read_into("a", 0, out)):
        with pytest.raises(ValueError, match=says):
            read()


def test_a_checkpoint_that_is_cut_while_it_is_loaded_names_its_file(
    config: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is truncated after its digest was verified."""
    train(config(0))
    checkpoint: Reader = newest_of(config(0))
    path = next(Path(str(checkpoint.checkpoints)).rglob("weights-*.safetensors"))
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ValueError, match=rf"{path} ends before byte"):
        load_weights(_no_model(monkeypatch), checkpoint)


def _no_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("pseudoreal_trainer.training.start.load_into", lambda *_: None)
    return None


def _without_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable renameat2, as on NFS."""
    monkeypatch.setattr(durable, "_rename_new", lambda *_: errno.EINVAL)


def _without_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable hard links, as on CIFS."""

    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "link", refuses)


@pytest.mark.parametrize("lacks", [_without_rename, _without_links])
def test_a_file_is_made_once_and_all_may_read_it(
    lacks: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacks(monkeypatch)
    path, mask = tmp_path / "layout.json", os.umask(0o022)
    try:
        FileStorage(path).create("first")
    finally:
        os.umask(mask)
    with pytest.raises(FileExistsError):
        FileStorage(path).create("second")
    assert path.read_text() == "first"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_is_given_up_while_its_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = Event(), Event()

    def hangs(_: int) -> None:
        begun.set()
        assert goes_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(files, "_flush_data", hangs)
    monkeypatch.setattr(files, "_FLUSHED_BYTES", 1)
    output = FileOutput(tmp_path / "file")
    try:
        output.write(memoryview(b"12"))
        assert begun.wait(PATIENCE_SECONDS)
        closing = Thread(target=output.close, daemon=True)
        closing.start()
        closing.join(PATIENCE_SECONDS)
        assert not closing.is_alive()
    finally:
        goes_on.set()
