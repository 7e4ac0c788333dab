"""The fields of a config.json, typed, with a record of those that were read. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_p3o.errors import InputError
from megatron_p3o.model_files import model_error


class Fields:
    """The fields of a JSON object, typed, with a record of those that were read."""

    def __init__(self, model_dir: Path, values: Mapping[str, Any]) -> None:
        self.model_dir = model_dir
        self._values = values
        self._read: set[str] = set()

    def error(self, problem: str) -> InputError:
        return model_error(self.model_dir, f"config.json: {problem}")

    def get(self, field: str) -> Any:
        """The value, or None for a missing field."""
        self._read.add(field)
        return self._values.get(field)

    def positive_int(self, field: str, *, default: int | None = None) -> int:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"{field}={value!r} must be a positive integer; mend it")
        return value

    def positive_float(self, field: str, *, default: float | None = None) -> float:
        value = self.get(field)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"{field}={value!r} must be a number above 0; mend it")
        return float(value)

    def count(self, field: str) -> int:
        """0 or more; 0 where it is missing."""
        value = self.get(field) or 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"{field}={value!r} must be an integer >= 0; mend it")
        return value

    def only(self, field: str, *supported: Any) -> Any:
        """The value, one of the supported; the first stands for a missing field."""
        value = self.get(field)
        value = supported[0] if value is None else value
        if value not in supported:
            raise self.error(
                f"{field}={value!r} is not supported, it must be "
                f"{' or '.join(map(repr, supported))}; use a model with that value"
            )
        return value

    def flag(self, field: str) -> bool:
        value = self.get(field) or False
        if not isinstance(value, bool):
            raise self.error(f"{field}={value!r} must be true or false; mend it")
        return value

    def unread(self) -> dict[str, Any]:
        return {name: value for name, value in self._values.items() if name not in self._read}
