"""Progress of a phase survives the way into a checkpoint and back."""

import ast
from pathlib import Path
from typing import Any

import pseudoreal_trainer
import pytest
from pseudoreal_api.resolved.config import PhaseConfig
from pseudoreal_trainer.checkpoint.manifest import (
    FORMAT_VERSION,
    Ending,
    Link,
    Manifest,
    Measurement,
    Random,
    Skipped,
    Updates,
)
from pseudoreal_trainer.data.block_order import BlockOrder
from pseudoreal_trainer.data.corpus import CorpusIdentity
from pseudoreal_trainer.training.progress import Progress
from pydantic import ValidationError

CORPUS = CorpusIdentity(files=1, size=5, sha256="07" * 32)
OF_THE_FILES = {"files_version", "tensors", "files", "link"}


def _manifest(config: PhaseConfig) -> Manifest:
    """Return a manifest in which no field has its default."""
    return Manifest(
        format_version=FORMAT_VERSION,
        files_version=4,
        job=config.job,
        execution=config.execution,
        phase=config.phase,
        phase_index=config.index,
        model=config.model,
        sharing=config.sharing,
        random=Random(
            generator="feistel-splitmix64-v1",
            seed=config.data.seed,
            mixture=None,
            blocks={"web": BlockOrder(windows=8, group=256)},
        ),
        corpus=CORPUS,
        step=9,
        phase_begin=6,
        tokens=864,
        global_cursor=54,
        consumed={"web": 50, "code": 4},
        mixture_begin=36,
        loss=3.5,
        start_validation_loss=3.75,
        validation_loss=3.25,
        phase_complete=True,
        ending=Ending(checks=1, step=12),
        measurement=Measurement(next_sharing=config.sharing, steps=1, shared={"a": [2.0]}, single={"a": [1.0]}),
        delinked=True,
        parent="real-00000008",
        optimizer_state="Scale",
        imported={"model_type": "llama", "pad_token_id": None},
        updates=Updates(others=9, blocks=3, left_out={"blocks.0": 1}),
        skipped=Skipped(steps=2, in_a_row=1),
        link=Link(folder="real-00000008", blocks=[0], first_moment_divisor=1, second_moment_divisor=1),
    )


def test_a_resumed_phase_saves_what_it_was_resumed_from(config: Any) -> None:
    """All fields are carried over, except the location of tensors and the history of this one checkpoint."""
    saved = _manifest(config(1))
    assert saved.model_fields_set >= set(Manifest.model_fields) - {"format", "tensors", "files"}
    again = Progress.saved_in(saved).manifest(config(1), CORPUS)
    changed = {"phase_complete": False, "delinked": False, "parent": "real-00000009"}
    for name in set(Manifest.model_fields) - OF_THE_FILES:
        assert getattr(again, name) == changed.get(name, getattr(saved, name)), name
    assert (again.tensors, again.files, again.link, again.files_version) == ({}, {}, None, None)
    assert Progress.saved_in(saved).manifest(config(1), CORPUS, complete=True).phase_complete


@pytest.mark.parametrize("fields", [{"stepp": 3}, {"step": "many"}, {"ending": {"checks": "many"}}])
def test_a_manifest_is_not_revised_to_what_it_cannot_say(fields: dict[str, Any], config: Any) -> None:
    with pytest.raises(ValidationError):
        _manifest(config(1)).revised(**fields)


@pytest.mark.parametrize("room", ["training", "checkpoint"])
def test_no_record_is_copied_unchecked(room: str) -> None:
    """Pydantic's `model_copy(update=...)` accepts any name and any type."""
    for file in Path(pseudoreal_trainer.__file__).parent.joinpath(room).rglob("*.py"):
        calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)]
        assert "model_copy" not in {call.attr for call in calls}, file
