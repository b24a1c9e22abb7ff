"""The built site, once for all tests."""

import os
import subprocess
from pathlib import Path

import pytest
from pseudoreal_dev.machine.paths import REPOSITORY

MKDOCS = REPOSITORY / ".venv-site/bin/mkdocs"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the site, built as `make site` builds it: a warning is an error."""
    if not (REPOSITORY / ".venv-site/ready").exists():
        pytest.skip("the environment of the site is missing; `make .venv-site/ready` installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder
