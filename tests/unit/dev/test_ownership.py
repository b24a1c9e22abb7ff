"""`sudo make demo` leaves no file of root in the checkout of a user; a full disk ends a command with a sentence."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
from pseudoreal_dev import cli
from pseudoreal_dev.machine import ownership

OWNER, OTHER = 1000, 1001


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_root_wrote_belongs_to_the_owner_of_the_checkout(tmp_path: Path) -> None:
    """Nothing outside, and nothing of others."""
    checkout, outside, other = tmp_path / "checkout", tmp_path / "outside", tmp_path / "checkout" / "other"
    (checkout / "runs" / "demo").mkdir(parents=True)
    for file in (outside, other, checkout / "runs" / "demo" / "loss.png"):
        file.touch()
    (checkout / "python").symlink_to(outside)
    os.link(outside, checkout / "package.py")
    os.chown(checkout, OWNER, OWNER)
    os.chown(other, OTHER, OTHER)
    ownership.give_back(checkout)
    below = [path for path in checkout.rglob("*") if path.name not in ("other", "package.py")]
    assert {(path.lstat().st_uid, path.lstat().st_gid) for path in below} == {(OWNER, OWNER)}
    assert (outside.stat().st_uid, other.stat().st_uid) == (0, OTHER)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_checkout_of_root_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "chown", lambda *_, **__: pytest.fail("a file was given away"))
    ownership.give_back(tmp_path)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_ends_with_a_sentence(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(**_: object) -> NoReturn:
        raise OSError(number, os.strerror(number), "/cache/images.tar")

    monkeypatch.setattr(cli, "commands", full)
    monkeypatch.setattr(ownership, "give_back", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "/cache/images.tar'. Make room, or set PSEUDOREAL_CACHE" in capsys.readouterr().out


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**_: object) -> NoReturn:
        raise FileNotFoundError

    monkeypatch.setattr(cli, "commands", missing)
    monkeypatch.setattr(ownership, "give_back", lambda: None)
    with pytest.raises(FileNotFoundError):
        cli.main()
