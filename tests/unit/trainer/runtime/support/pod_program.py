"""Run the pod program with faulty ranks, frequent reports, and the token and CA that the test provides."""

import os
from functools import partial
from pathlib import Path

from pseudoreal_api.wire.reports import REPORT_URL
from pseudoreal_trainer.cli import pod as program
from pseudoreal_trainer.runtime import reports
from pseudoreal_trainer.runtime.reports import Endpoint

TOKEN, AUTHORITY = "PSEUDOREAL_TEST_TOKEN", "PSEUDOREAL_TEST_AUTHORITY"
SECONDS = 0.1


def _endpoint() -> Endpoint | None:
    if REPORT_URL not in os.environ:
        return None
    return Endpoint(os.environ[REPORT_URL], Path(os.environ[TOKEN]), Path(os.environ[AUTHORITY]))


if __name__ == "__main__":
    reports._MOST_SECONDS = 2 * SECONDS
    program.WORKER = "tests.unit.trainer.runtime.support.faulty_worker"
    for name, value in (("endpoint_of_pod", _endpoint), ("reporting", partial(reports.reporting, seconds=SECONDS))):
        setattr(program, name, value)
    program.main()
