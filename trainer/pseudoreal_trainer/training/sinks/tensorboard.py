"""Event files that TensorBoard reads."""

from pathlib import Path
from textwrap import indent

from pseudoreal_trainer.training.sinks.sink import Figures, Texts

PACKAGE = "tensorboardX"
FOLDER = "tensorboard"


class TensorBoard:
    def __init__(self, work_directory: Path, execution: int, first_step: int) -> None:
        """`first_step`: the first one that will be logged; what an earlier execution wrote from there on is hidden."""
        from tensorboardX import SummaryWriter

        # Names of files have the second in which they were begun; the suffix tells two of one second apart.
        self._writer = SummaryWriter(
            str(work_directory / FOLDER), purge_step=first_step, flush_secs=10, filename_suffix=f".{execution}"
        )

    def log(self, step: int, figures: Figures, texts: Texts) -> None:
        for name, figure in figures.items():
            self._writer.add_scalar(name, figure, step)
        for name, text in texts.items():
            # It takes texts for Markdown, of which what is indented is shown as it is.
            self._writer.add_text(name, indent(text, "    ", lambda _: True), step)

    def close(self) -> None:
        self._writer.close()
