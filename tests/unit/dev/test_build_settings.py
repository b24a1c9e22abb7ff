import io
from pathlib import Path

from pseudoreal_dev.images import build_settings
from pseudoreal_dev.machine import mounts


def test_the_environments_pip_settings_win_over_the_files() -> None:
    settings = build_settings.parse(":env:.timeout='180'\nglobal.timeout='15'\ninstall.pre='true'\n")
    assert settings.get("global", "timeout") == "180"
    assert settings.get("install", "pre") == "true"


def test_a_setting_may_hold_any_sign() -> None:
    settings = build_settings.parse("global.find-links='\\n/a=b\\n/c%d'\n")
    out = io.StringIO()
    settings.write(out)
    assert settings.get("global", "find-links").split() == ["/a=b", "/c%d"]


def test_mounts_below_a_folder_come_innermost_first() -> None:
    def line(point: str) -> str:
        return f"1 2 0:1 / {point} rw - tmpfs tmpfs rw"

    text = "\n".join(map(line, ["/", "/state", "/state/a", "/state/a/b\\040c", "/states/x", "/state/z"]))
    found = mounts.below(Path("/state"), text)
    assert found == [Path("/state/z"), Path("/state/a/b c"), Path("/state/a")]
