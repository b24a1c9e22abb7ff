"""YAML with the line and column of each field. Pure.

Values are as kubectl reads them. A repeated key is an error, as for the API server: kubectl takes the last one
without a word.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from pseudoreal_trainer.cli.yaml_scalars import Loader

_PATH = re.compile(r"\b(?:apiVersion|kind|metadata|spec)\b(?:\.[A-Za-z]\w*|\[[^\]\s]+\])*")
_STEP = re.compile(r"([A-Za-z]\w*)|\[([^\]]+)\]")


@dataclass(frozen=True)
class Fault:
    """Fault of a job file, with its position. `line` and `column` count from 1."""

    line: int
    column: int
    sentence: str

    def text(self, file: str) -> str:
        return f"{file}:{self.line}:{self.column}: {self.sentence}"


MOST_VALUES = 100_000
"""Maximum number of values in a document. The API server refuses larger objects by their bytes."""


class UnreadableYaml(ValueError):
    """The text is not YAML, repeats a key, or has too many values."""

    def __init__(self, faults: list[Fault]) -> None:
        super().__init__("\n".join(fault.sentence for fault in faults))
        self.faults = faults


@dataclass(frozen=True)
class Document:
    """Document of a YAML file: its content, and its tree of nodes with positions."""

    body: Any
    node: yaml.Node

    def fault(self, sentence: str) -> Fault:
        """Return the sentence as a fault. The position is the key of the first field path in the sentence, or the
        nearest enclosing key in the document."""
        mark = self.node.start_mark
        named = _PATH.search(sentence)
        node: yaml.Node | None = self.node
        for step in _STEP.finditer(named[0] if named else ""):
            found = _child(node, step[1] or step[2])
            if found is None:
                break
            mark, node = found
        return Fault(mark.line + 1, mark.column + 1, sentence)


def read_documents(text: str) -> list[Document]:
    """Return the nonempty documents. Raises UnreadableYaml."""
    try:
        loader = Loader(text)
        documents = [*_each(loader)]
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        raise UnreadableYaml([Fault(line, column, f"this is no YAML: {_problem(error)}")]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise UnreadableYaml([Fault(1, 1, f"this is no YAML: {error}")]) from error
    return documents


def _problem(error: yaml.MarkedYAMLError) -> str:
    around = error.context_mark
    where = f" {error.context} that begins in line {around.line + 1}" if around else ""
    return f"{error.problem}{where}"


def _each(loader: Loader) -> Iterator[Document]:
    while loader.check_node():
        node = loader.get_node()
        assert node is not None, "check_node() is True only if there is a node"
        repeated = sorted({*_repeated(node)}, key=lambda fault: (fault.line, fault.column))
        if repeated:
            raise UnreadableYaml(repeated)
        try:
            body = loader.construct_document(node)
        except (ValueError, LookupError, AttributeError) as error:  # a tag that does not suit its value, as in !!int x
            mark = node.start_mark
            raise UnreadableYaml([Fault(mark.line + 1, mark.column + 1, f"this is no YAML: {error}")]) from error
        if body is not None:
            yield Document(body, node)


def _repeated(node: yaml.Node) -> Iterator[Fault]:
    """Yield a fault for each repeated key. Raises UnreadableYaml if the document has more than MOST_VALUES values."""
    nodes, count = [node], 0
    while nodes:
        node, count = nodes.pop(), count + 1
        # Aliases share one node, so a file of a few lines can have more values than memory holds once it is walked.
        if count > MOST_VALUES:
            sentence = f"the document has more than {MOST_VALUES:,} values, each alias counted with all that it names"
            raise UnreadableYaml([Fault(node.start_mark.line + 1, node.start_mark.column + 1, sentence)])
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    if key.value in seen:
                        mark, sentence = key.start_mark, f"{key.value} stands here a second time; keep one of them"
                        yield Fault(mark.line + 1, mark.column + 1, sentence)
                    seen.add(key.value)
                nodes.append(value)
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value


def _child(node: yaml.Node | None, step: str) -> tuple[yaml.Mark, yaml.Node] | None:
    """Return the position and value of a field or list item. A list item is named by its index, or by its `name`
    field."""
    if isinstance(node, yaml.MappingNode):
        return next(((key.start_mark, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode):
        if step.isdecimal():
            items = node.value[int(step) : int(step) + 1]
        else:
            items = [item for item in node.value if _name(item) == step]
        return (items[0].start_mark, items[0]) if items else None
    return None


def _name(item: yaml.Node) -> str | None:
    found = _child(item, "name") if isinstance(item, yaml.MappingNode) else None
    return str(found[1].value) if found else None
