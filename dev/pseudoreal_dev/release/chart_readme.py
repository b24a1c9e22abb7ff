"""Generates the README of each chart, from Chart.yaml and the commented values.yaml."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pseudoreal_dev.machine import paths

CHARTS = tuple(paths.REPOSITORY / "charts" / name for name in ("pseudoreal", "pseudoreal-llama"))
FILE_NAME = "README.md"
_NOTE = "<!-- Written by `make generate` from Chart.yaml and values.yaml. -->"
_OPTIONS = {
    "pseudoreal": "--set operator.image.repository=REGISTRY/pseudoreal-operator"
    " --set trainer.image.repository=REGISTRY/pseudoreal-trainer",
    "pseudoreal-llama": "--set image=REGISTRY/pseudoreal-trainer:{version}",
}
"""Values without which the chart is refused, as options of Helm."""
_DOCUMENTS = {
    "pseudoreal": "[Running the operator](../../docs/operations.md), [security](../../docs/security.md), "
    "[monitoring](../../docs/monitoring.md), [every field of a job](../../docs/manifest.md).",
    "pseudoreal-llama": "[From text to a Llama](../../docs/llama.md).",
}


@dataclass(frozen=True)
class Value:
    """A value of a chart. `default`: text of the value in values.yaml; empty for a group of values. `text`: comment
    above the value."""

    name: str
    default: str
    text: str


def values(text: str) -> Iterator[Value]:
    """Yield the values and value groups of a values.yaml, in file order. A mapping in braces counts as one value."""
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    if isinstance(root, yaml.MappingNode):
        yield from _below(root, "", text, text.splitlines())


def _below(group: yaml.MappingNode, prefix: str, text: str, lines: list[str]) -> Iterator[Value]:
    for key, value in group.value:
        name, comment = f"{prefix}{key.value}", _comment(lines, key.start_mark.line)
        if isinstance(value, yaml.MappingNode) and not value.flow_style:
            if comment:
                yield Value(name, "", comment)
            yield from _below(value, f"{name}.", text, lines)
        else:
            yield Value(name, text[value.start_mark.index : value.end_mark.index], comment)


def _comment(lines: list[str], line: int) -> str:
    """Return the comment block directly above a line, as one paragraph."""
    found: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        found.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(found)


def readme(chart: Path) -> str:
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    name = about["name"]
    rows = [_row(value) for value in values((chart / "values.yaml").read_text())]
    return "\n".join(
        [
            f"# {name}",
            "",
            _NOTE,
            "",
            f"{about['description']}. Kubernetes {about['kubeVersion'].removesuffix('-0')}. {_DOCUMENTS[name]}",
            *_installing(chart, about),
            "",
            "## Values",
            "",
            "`values.schema.json` refuses values that are not in this table.",
            "",
            "| value | default | |",
            "| --- | --- | --- |",
            *rows,
            "",
        ]
    )


def _installing(chart: Path, about: dict[str, Any]) -> list[str]:
    """Return the lines that install the chart: with images of one's own, unless its values name published ones."""
    name, found = about["name"], yaml.safe_load((chart / "values.yaml").read_text())
    image = found["image"] if "image" in found else found["operator"]["image"]["repository"]
    where = f"--namespace {name} --create-namespace"
    if image:
        return ["", "```sh", f"helm install {name} {name}-{about['version']}.tgz {where}", "```"]
    return [
        "No image is published yet: [how to build the images](../../README.md#install-on-your-cluster).",
        "",
        "```sh",
        f"helm install {name} charts/{name} {where} \\",
        f"  {_OPTIONS[name].format(version=about['appVersion'])}",
        "```",
    ]


def _row(value: Value) -> str:
    cells = (f"`{value.name}`", f"`{value.default}`" if value.default else "", value.text)
    return "| " + " | ".join(cell.replace("|", r"\|").replace("\n", " ") for cell in cells) + " |"


def write() -> None:
    for chart in CHARTS:
        (chart / FILE_NAME).write_text(readme(chart))


if __name__ == "__main__":
    write()
