"""Sink for TensorBoard event files."""

from pathlib import Path
from textwrap import indent

from pseudoreal_trainer.training.sinks.sink import Figures, Texts

PACKAGE = "tensorboardX"
FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self, work_directory: Path, execution: int, first_step: int) -> None:
        """`first_step` is the first step to be logged; an earlier execution's entries from there on are hidden."""
        from tensorboardX import SummaryWriter

        # A file's name has the second of its creation; the suffix distinguishes executions created in the same second.
        self._writer = SummaryWriter(
            str(work_directory / FOLDER), purge_step=first_step, flush_secs=10, filename_suffix=f".{execution}"
        )

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, step)
        for name, text in texts.items():
            # TensorBoard renders Markdown, which shows indented text verbatim.
            self._writer.add_text(name, indent(text, "    ", lambda _: True), step)

    def close(self) -> None:
        self._writer.close()
