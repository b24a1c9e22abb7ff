"""Reader of config.json that knows which entries were never read."""

from typing import Any

from pseudoreal_trainer.errors import UnfitWeights


class ConfigEntries:
    """Entries of a config.json, with a record of which were read. `integer` and `number` raise UnfitWeights for a
    missing entry or a wrong type."""

    def __init__(self, config: dict[str, Any], prefix: str = "") -> None:
        self._config, self._prefix = config, prefix
        self._read: set[str] = set()

    def get(self, name: str, default: Any) -> Any:
        self._read.add(name)
        return self._config.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number of at least 1."""
        found = self.get(name, None)
        found = default if found is None else found
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UnfitWeights(f"{self._prefix}{name} is {_describe(found)}, and must be a whole number of at least 1")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        found = self.get(name, None)
        found = default if found is None else found
        if not isinstance(found, int | float) or isinstance(found, bool):
            raise UnfitWeights(f"{self._prefix}{name} is {_describe(found)}, and must be a number")
        return float(found)

    def unread(self) -> list[str]:
        """Return the names of the entries that were never read."""
        return sorted(self._config.keys() - self._read)


def _describe(value: Any) -> str:
    return "missing" if value is None else repr(value)
