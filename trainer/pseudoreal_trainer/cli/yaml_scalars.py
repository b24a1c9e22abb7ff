"""YAML as kubectl reads it: PyYAML with the rules of Go's parser for scalars, keys and tags. Pure.

kubectl turns YAML into JSON with sigs.k8s.io/yaml, a parser of YAML 1.1 with exceptions: `3e-4` is a number, `1e1` an
integer, `0o17` is fifteen, `12:30` a text, `y` is true, a date is a text, and an unknown tag says nothing.
"""

import math
import re
from base64 import b64decode
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
}
_KINDS: dict[type[yaml.Node], str] = {yaml.ScalarNode: "str", yaml.SequenceNode: "seq", yaml.MappingNode: "map"}
"""Kind of a node -> tag of a node of this kind that has none and is no plain scalar."""
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_INTEGER = re.compile(r"([-+]?)(0[bB][01]+|0[oO][0-7]+|0[xX][0-9a-fA-F]+|0[0-7]*|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INT64, _UINT64 = 2**63, 2**64
_MOST_DIGITS = 100
"""Maximum number of characters of an integer of 64 bits, with leading zeros; longer ones are floats."""
_LARGEST_INTEGRAL = 1e21
"""Float from which Go writes an exponent into JSON; a smaller float without a fraction becomes an integer."""


def scalar(text: str) -> bool | int | float | str | None:
    """Return the value of a plain scalar, as the API server finds it in kubectl's JSON. A float is infinite or NaN only
    if the text says so."""
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        return math.nan
    if not text[0].isdigit() and text[0] not in "+-.":
        return text
    # A float that begins with its point is parsed without YAML's underscores.
    digits = text if text[0] == "." else text.replace("_", "")
    number = _number(digits)
    return text if number is None else _as_json(number)


def _number(digits: str) -> int | float | None:
    if len(digits) <= _MOST_DIGITS and (found := _INTEGER.fullmatch(digits)):
        sign, magnitude = found.groups()
        is_octal = magnitude[0] == "0" and magnitude.isdigit()
        value = int(f"{sign}{magnitude}", 8 if is_octal else 0)
        if -_INT64 <= value < (_INT64 if sign else _UINT64):
            return value
    if not _FLOAT.fullmatch(digits):
        return None
    value_float = float(digits)
    return value_float if math.isfinite(value_float) else None


def _as_json(number: int | float) -> int | float:
    """Return the number as the API server decodes it: no integer needs more than 64 bits."""
    if isinstance(number, float) and number.is_integer() and abs(number) < _LARGEST_INTEGRAL:
        number = int(number)
    return float(number) if isinstance(number, int) and not -_INT64 <= number < _INT64 else number


class Loader(yaml.SafeLoader):
    """Loader of YAML as kubectl reads it; all values have a type of JSON."""

    def resolve(self, kind: type[yaml.Node], value: Any, implicit: Any) -> str:
        if kind is not yaml.ScalarNode or not implicit[0]:
            return _TAG + _KINDS[kind]
        if value == "<<":
            return f"{_TAG}merge"
        found = scalar(value)
        return _TAG + ("null" if found is None else type(found).__name__)

    def fetch_directive(self) -> None:
        raise yaml.scanner.ScannerError(
            None, None, "a line that begins with % is a directive; kubectl reads none, so remove it", self.get_mark()
        )

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        self.flatten_mapping(node)
        # Not through a dict with the keys as they are: to Python 1 and true are one key.
        return {self._key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def _key(self, node: yaml.Node) -> str:
        """Return the key as text, as which kubectl writes it into JSON."""
        key = self.construct_object(node, deep=True)
        if isinstance(key, bool):
            return "true" if key else "false"
        if isinstance(key, str | int | float):
            return str(key)
        raise yaml.constructor.ConstructorError(None, None, "a key must be a text, or in quotes", node.start_mark)

    def construct_plain(self, node: yaml.Node) -> Any:
        """Construct a value whose tag says nothing, or nothing that JSON has."""
        if isinstance(node, yaml.MappingNode):
            return self.construct_mapping(node, deep=True)
        if isinstance(node, yaml.SequenceNode):
            return self.construct_sequence(node, deep=True)
        return str(node.value)

    def construct_typed(self, node: yaml.Node) -> Any:
        """Construct a null, a bool or a number."""
        found = scalar(node.value) if isinstance(node, yaml.ScalarNode) else node
        wanted = node.tag.removeprefix(_TAG)
        kind = "null" if found is None else type(found).__name__
        if kind != wanted and (kind, wanted) not in (("int", "float"), ("float", "int")):
            raise yaml.constructor.ConstructorError(None, None, f"the value is no {wanted}", node.start_mark)
        if isinstance(found, float) and not math.isfinite(found):
            raise yaml.constructor.ConstructorError(None, None, "JSON has no infinity and no NaN", node.start_mark)
        return found

    def construct_time(self, node: yaml.Node) -> Any:
        raise yaml.constructor.ConstructorError(
            None, None, "kubectl makes a time of what !!timestamp marks; write it in quotes", node.start_mark
        )

    def construct_binary(self, node: yaml.Node) -> str:
        return b64decode("".join(str(node.value).split()), validate=True).decode(errors="replace")


for _name in ("null", "bool", "int", "float"):
    Loader.add_constructor(f"{_TAG}{_name}", Loader.construct_typed)
for _name in ("merge", "set", "omap", "pairs"):
    Loader.add_constructor(f"{_TAG}{_name}", Loader.construct_plain)
Loader.add_constructor(f"{_TAG}timestamp", Loader.construct_time)
Loader.add_constructor(f"{_TAG}binary", Loader.construct_binary)
Loader.add_constructor(None, Loader.construct_plain)


class Dumper(yaml.SafeDumper):
    """Dumper whose text kubectl reads as the same values: texts that look like numbers to it are in quotes."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar(f"{_TAG}str", text, style=None if scalar(text) == text else "'")


Dumper.add_representer(str, Dumper.represent_text)
