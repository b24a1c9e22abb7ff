"""The pod program, with faulty ranks; it reports often, and finds token and authority where the test has put them."""

import os
from functools import partial
from pathlib import Path

from pseudoreal_api.reports import REPORT_URL
from pseudoreal_trainer import pod
from pseudoreal_trainer.tell import reporting
from pseudoreal_trainer.tell.endpoint import Endpoint

TOKEN, AUTHORITY = "PSEUDOREAL_TEST_TOKEN", "PSEUDOREAL_TEST_AUTHORITY"
SECONDS = 0.1


def _endpoint() -> Endpoint | None:
    if REPORT_URL not in os.environ:
        return None
    return Endpoint(os.environ[REPORT_URL], Path(os.environ[TOKEN]), Path(os.environ[AUTHORITY]))


if __name__ == "__main__":
    reporting._MOST_SECONDS = 2 * SECONDS
    pod.WORKER = "tests.unit.trainer.tell.faulty_worker"
    pod.endpoint_of_pod = _endpoint
    pod.reporting = partial(reporting.reporting, seconds=SECONDS)
    pod.main()
