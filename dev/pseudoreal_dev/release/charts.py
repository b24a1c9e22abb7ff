"""The charts of a release: with the images of the release as their values, packaged, and as OCI layouts."""

import json
import re
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_dev.machine import shell
from pseudoreal_dev.release import archives, chart_readme
from pseudoreal_dev.release.archives import Blob

_CONFIG = "application/vnd.cncf.helm.config.v1+json"
_CONTENT = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"
_UNPUBLISHED = re.compile(r" None is published yet: [^.]*\.| No image is published yet: [^.]*\.")
"""Sentences of values.yaml that hold only while no image is published."""


def name_images(chart: Path, images: Mapping[str, str]) -> None:
    """Write the published images, as REPOSITORY@DIGEST by target, into the values of a chart and its README."""
    values, about = chart / "values.yaml", chart / "Chart.yaml"
    text = values.read_text()
    if chart.name == "pseudoreal":
        for part in ("operator", "trainer"):
            repository, _, digest = images[part].partition("@")
            wanted = f'{{repository: {repository}, tag: "", digest: "{digest}", pullPolicy: IfNotPresent}}'
            text = _replaced(text, f"{part}.image", wanted)
        listed = "".join(f"    - {{name: {part}, image: {images[part]!r}}}\n" for part in ("operator", "trainer"))
        annotations = f"annotations:\n  artifacthub.io/images: |\n{listed}"
        about.write_text(about.read_text().replace("annotations:\n", annotations, 1))
    else:
        text = _replaced(text, "image", f'"{images["trainer"]}"')
    values.write_text(_UNPUBLISHED.sub("", text))
    (chart / chart_readme.FILE_NAME).write_text(chart_readme.readme(chart))


def package(helm: Path, chart: Path, folder: Path, time: int) -> Path:
    """Package a chart into a folder, and return the archive."""
    made = folder / "helm-package"
    shell.output([helm, "package", chart, "--destination", made])
    (packed,) = made.iterdir()
    target = folder / packed.name
    target.write_bytes(archives.repack(packed.read_bytes(), time))
    shutil.rmtree(made)
    return target


def write_oci_archive(packed: Path, chart: Path, target: Path, time: int) -> str:
    """Write a packaged chart as `helm push` would store it in a registry into an OCI archive; return its digest."""
    about: dict[str, Any] = yaml.safe_load((chart / "Chart.yaml").read_text())
    annotations = {
        "org.opencontainers.image.title": about["name"],
        "org.opencontainers.image.description": about["description"],
        "org.opencontainers.image.version": about["version"],
        "org.opencontainers.image.created": datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    config = Blob(_CONFIG, json.dumps(about, separators=(",", ":")).encode())
    layout = target.with_suffix("")
    content = Blob(_CONTENT, packed.read_bytes())
    digest = archives.write_layout(layout, config, [content], annotations, about["version"])
    archives.tar_folder(layout, target, time)
    shutil.rmtree(layout)
    return digest


def _replaced(text: str, name: str, wanted: str) -> str:
    """Return the text of a values.yaml with another value for a dotted name; comments stay."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    for part in name.split("."):
        assert isinstance(node, yaml.MappingNode)
        node = next(value for key, value in node.value if key.value == part)
    assert node is not None
    return text[: node.start_mark.index] + wanted + text[node.end_mark.index :]
