"""Images run under any user id, as on OpenShift: group 0, and no entry in /etc/passwd."""

import getpass
import os
import re

import pytest
from pseudoreal_dev.machine import paths

from tests.support.processes import Forked

ANY_ID = 1_000_810_000
DOCKERFILE = (paths.REPOSITORY / "Dockerfile").read_text()


def stage(name: str) -> str:
    """Return the lines of one stage of the Dockerfile."""
    (text,) = re.findall(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(text)


def environment(*stages: str) -> dict[str, str]:
    lines = [line for name in stages for line in re.findall(r"^ENV (.*)$", stage(name), re.MULTILINE)]
    return {key: value.strip('"') for line in lines for key, value in re.findall(r'(\w+)=("[^"]*"|\S+)', line)}


def _named(variables: dict[str, str]) -> None:
    os.setgroups([])
    os.setgid(0)
    os.setuid(ANY_ID)
    os.environ.clear()
    os.environ.update(variables)
    # torch calls this function to name its cache folder of compiled code.
    print(getpass.getuser(), flush=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="another user can be chosen by root alone")
def test_a_trainer_of_any_user_has_a_name() -> None:
    given = environment("base", "trainer")
    named = Forked(_named, given)
    assert named.wait() == 0, named.log.read_text()
    assert named.log.read_text() == "pseudoreal\n"
    without = Forked(_named, {name: value for name, value in given.items() if name != "USER"})
    assert without.wait() != 0, "USER provides the name"


def test_nothing_in_an_image_belongs_to_its_user() -> None:
    """Files owned by one user id might be unreadable or read-only under another; pods write only to volumes."""
    assert "chown" not in DOCKERFILE
    assert "chmod" not in DOCKERFILE
    for name in ("operator", "trainer"):
        assert stage(name).count("USER 10001:10001") == 1
        assert "VOLUME" not in stage(name)
