"""A preparation that takes milliseconds, and one that kills itself."""

import os
import signal
import sys
from pathlib import Path

from pseudoreal_trainer.data.prepare.group import Work, prepare_group
from pseudoreal_trainer.data.prepare.inputs import find_inputs, groups_of
from pseudoreal_trainer.data.prepare.settings import Settings
from pseudoreal_trainer.data.tokenizer.tokenizer import ByteTokenizer

from tests.unit.trainer.data.prepare.support.silent import Silent

TEXTS = [f"document {number} " * (number % 7 + 1) for number in range(20)]


def prepare_small(inputs: Path, output: Path) -> None:
    """Prepare the tokens of TEXTS in one file: three shards."""
    [group] = groups_of(find_inputs([inputs]))
    output.mkdir(exist_ok=True)
    prepare_group(Work(group, Settings(shard_bytes=600), output), ByteTokenizer(), Silent())


def prepare_until(inputs: Path, output: Path, renames: int) -> None:
    """Prepare, and kill this process at rename number `renames`. A file exists once it has its name, so states between
    two renames are equivalent."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        seen += event == "os.rename"
        if event == "os.rename" and seen == renames:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    prepare_small(inputs, output)
