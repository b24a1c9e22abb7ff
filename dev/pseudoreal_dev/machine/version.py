"""The project's version: pyproject.toml states it, and charts and documents get it from there."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.version import Version

from pseudoreal_dev.machine import paths

_CHART_LINE = re.compile(r"^((?:version|appVersion): ).*$", re.MULTILINE)
_DOCKERFILE_LINE = re.compile(r"^(ARG VERSION=).*$", re.MULTILINE)
_STATUS = re.compile(r"(?<=This is )\d+\.\d+[^;\n]*(?=; \[what upgrades)")
_IMAGE_TAG = re.compile(r"(\bREGISTRY/pseudoreal-(?:operator|trainer):)\d+\.\d+\.\d+(?:-[a-z]+\.\d+(?:\.dev\.\d+)?)?")


def read(repository: Path = paths.REPOSITORY) -> Version:
    with (repository / "pyproject.toml").open("rb") as file:
        return Version(tomllib.load(file)["project"]["version"])


def semantic(version: Version) -> str:
    """Return the version as charts, image tags and krew write it: 0.4.0.dev0 is 0.4.0-dev.0, 0.4.0rc1 is 0.4.0-rc.1."""
    marks = [*(version.pre or ()), *(("dev", version.dev) if version.dev is not None else ())]
    return "-".join(filter(None, [version.base_version, ".".join(map(str, marks))]))


def stamped(repository: Path = paths.REPOSITORY) -> Iterator[tuple[Path, str]]:
    """Yield each file that states the version, and its text with the version of pyproject.toml."""
    stated = read(repository)
    wanted = semantic(stated)
    status = f"{stated.major}.{stated.minor} under development" if stated.is_devrelease else wanted
    for chart in sorted(repository.glob("charts/*/Chart.yaml")):
        yield chart, _CHART_LINE.sub(rf"\g<1>{wanted}", chart.read_text())
    dockerfile = repository / "Dockerfile"
    yield dockerfile, _DOCKERFILE_LINE.sub(rf"\g<1>{wanted}", dockerfile.read_text())
    for document in sorted([*repository.glob("*.md"), *repository.glob("docs/*.md")]):
        text = document.read_text()
        if document.name != "CHANGELOG.md" and (_IMAGE_TAG.search(text) or _STATUS.search(text)):
            yield document, _STATUS.sub(status, _IMAGE_TAG.sub(rf"\g<1>{wanted}", text))


def write(repository: Path = paths.REPOSITORY) -> None:
    for path, text in stamped(repository):
        path.write_text(text)


if __name__ == "__main__":
    write()
