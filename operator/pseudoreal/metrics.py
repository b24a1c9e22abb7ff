"""Metrics of a job as rows: one row a step, one value a column, as pandas.DataFrame takes them."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pseudoreal_api.wire.messages import ProgressReport
from pseudoreal_operator.observe.reading import progress_of
from pseudoreal_trainer.errors import TrainingError
from pydantic import ValidationError

from pseudoreal.errors import Unreadable

Row = dict[str, Any]
"""Column -> value, a number, a text or None. The columns are the keys of metrics.jsonl (docs/metrics.md); those of a
nested value are joined by a point, for instance `checkpoint.seconds`."""


def rows_of_log(lines: Iterable[str]) -> list[Row]:
    """Return the rows of a trainer's log. An execution that resumes from a checkpoint trains the steps after it again:
    its rows replace the earlier ones."""
    rows: list[Row] = []
    for report in filter(None, map(progress_of, lines)):
        while rows and rows[-1]["step"] >= report.step:
            rows.pop()
        rows.append(_row(report))
    return rows


def read_metrics(folder: str | Path) -> list[Row]:
    """Return a row for each step of a job. `folder`: work directory of a run, or the s3://, gs:// or az:// URL of the
    folder with checkpoints/. Raises Unreadable if there are no metrics, or they are of another release."""
    # Here, because they import numpy, which the commands for a cluster need not wait for.
    from pseudoreal_trainer.storage.path import storage_path
    from pseudoreal_trainer.training.metrics_file import metrics_of

    try:
        return [_row(ProgressReport.model_validate_json(line)) for line in metrics_of(storage_path(str(folder)))]
    except ValidationError as error:
        raise Unreadable(f"the metrics in {folder} are not of this release: {error.errors()[0]['msg']}") from error
    except (OSError, ValueError, TrainingError) as error:
        raise Unreadable(f"no metrics: {error}") from error


def _row(report: ProgressReport) -> Row:
    return dict(_columns(report.model_dump(exclude={"samples"})))


def _columns(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _columns(value, f"{before}{name}.")
        elif isinstance(value, list):
            yield from _columns({str(index): item for index, item in enumerate(value)}, f"{before}{name}.")
        else:
            yield f"{before}{name}", value
