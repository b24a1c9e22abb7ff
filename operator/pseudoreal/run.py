"""Runs on this machine: their processes, their metrics and their last checkpoint."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pseudoreal_api.spec.check import InvalidJob
from pseudoreal_api.spec.job import PseudoRealJob
from pseudoreal_trainer.checkpoint.manifest import Head
from pseudoreal_trainer.cli.local_run import LocalRun, PodFailed, set_endpoint
from pseudoreal_trainer.cli.run_command import with_paths_from
from pseudoreal_trainer.cli.run_directory import RunDirectory, open_run
from pseudoreal_trainer.convert.export import export_checkpoint
from pseudoreal_trainer.convert.formats import FORMATS
from pseudoreal_trainer.errors import InvalidJobError, TrainingError
from pseudoreal_trainer.storage.path import StoragePath

from pseudoreal.errors import RunFailed
from pseudoreal.metrics import Row, read_metrics

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """A complete run."""

    directory: RunDirectory

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self.directory.path

    @property
    def checkpoint(self) -> StoragePath:
        """Folder of the last checkpoint."""
        return self.directory.store.folder / self._last.name

    @property
    def _last(self) -> Head:
        last = self.directory.final_checkpoint(len(self.directory.job.spec.phases) - 1)
        assert last is not None, "every phase of a complete run has a final checkpoint"
        return last

    def metrics(self) -> list[Row]:
        """Return a row for each step: `pandas.DataFrame(run.metrics())`."""
        return read_metrics(self.path)

    def export(self, output: str | Path, format: str = "huggingface") -> Path:
        """Write the weights of the last checkpoint into a new folder for other programs, and return the folder.

        `format`: huggingface, safetensors or dcp, as for `pseudoreal export`. Raises InvalidJob if the format cannot
        express the model, or the folder exists.
        """
        folder = Path(output)
        if format not in FORMATS:
            raise InvalidJob(f"there is no format {format}; there are {', '.join(FORMATS)}")
        try:
            export_checkpoint(self.directory.store, self._last, format, folder)
        except (ValueError, OSError, TrainingError) as error:
            raise InvalidJob(str(error)) from error
        return folder


def run_locally(
    job: PseudoRealJob, folder: Path, workdir: Path | None, resume: bool, on_event: Callable[[Json], None] | None
) -> Run:
    """Train the job. `folder`: start of its relative paths. Raises RunFailed and InvalidJob."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run_locally handles interrupts, so it must be called in the main thread")
    workdir = workdir or Path("pseudoreal-runs") / job.metadata.name
    try:
        directory = open_run(workdir, with_paths_from(job, folder), resume=resume)
        set_endpoint(job.spec.checkpoint.storage)
        LocalRun(directory, on_event or (lambda _: None)).run()
    except InvalidJobError as error:
        raise InvalidJob(str(error)) from error
    except PodFailed as failed:
        message = failed.message
        raise RunFailed(
            f"phase {message.phase}: {message.outcome}: {message.message}; logs of the processes: {workdir / 'pods'};"
            " run_locally(resume=True) goes on from the last checkpoint",
            message.outcome,
        ) from None
    return Run(directory)
