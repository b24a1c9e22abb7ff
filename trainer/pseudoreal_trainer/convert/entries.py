"""A config.json whose entries are all looked at, or named."""

from typing import Any

from pseudoreal_trainer.convert.errors import Unfit


class Entries:
    """Takes entries, and knows which nobody has asked for. What is missing or of a wrong type raises Unfit."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self._config, self._prefix = config, prefix
        self._asked: set[str] = set()

    def get(self, name: str, default: Any) -> Any:
        self._asked.add(name)
        return self._config.get(name, default)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        found = self.get(name, None)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise Unfit(f"{self._prefix}{name} is {_said(found)}, and must be a whole number of at least 1")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self.get(name, None)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise Unfit(f"{self._prefix}{name} is {_said(found)}, and must be a number")
        return float(found)

    def rest(self) -> list[str]:
        """Names of the entries that nobody has asked for."""
        return sorted(self._config.keys() - self._asked)


def _said(value: Any) -> str:
    return "missing" if value is None else repr(value)
