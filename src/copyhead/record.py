"""Record: the base of all validated settings, whose errors are one line that names field, value and allowed range."""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError


class ProblemError(ValueError):
    """A parameter is outside its range; the message names the field, the value and the allowed range."""


def plain(value: Any) -> Any:
    """What JSON can hold: arrays and tuples as lists, a number that is nan or infinite as None."""
    if isinstance(value, dict):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    return value


class Record(BaseModel):
    """A frozen set of validated fields; a bad field gives one line with its name, its value and the allowed range.

    Raises:
        ProblemError: for a missing, unknown or out-of-range field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise ProblemError("; ".join(self._one_line(item) for item in error.errors())) from None

    def replace(self, **overrides: Any) -> Self:
        """A validated copy with some fields replaced."""
        return type(self)(**{**dict(self), **overrides})

    @classmethod
    def _one_line(cls, item: Any) -> str:
        """One error of pydantic as 'field = value: allowed range'."""
        name, kind = str(item["loc"][0]) if item["loc"] else "record", item["type"]
        if kind == "missing":
            return f"{name}: missing; must be given ({cls.model_fields[name].description})"
        if kind == "extra_forbidden":
            return f"{name}: no such field; fields are {', '.join(cls.model_fields)}"
        if kind == "value_error" and not item["loc"]:
            return str(item["ctx"]["error"])
        if kind == "value_error":
            return f"{name} = {item['input']!r}: {item['ctx']['error']}"
        return f"{name} = {item['input']!r}: {cls.allowed_range(name)}"

    @classmethod
    def allowed_range(cls, name: str) -> str:
        """The values that a field admits, in words."""
        schema = cls.model_json_schema()["properties"][name]
        schema = next((option for option in schema.get("anyOf", []) if option.get("type") != "null"), schema)
        if "enum" in schema:
            return f"must be one of {', '.join(schema['enum'])}"
        if schema.get("type") == "boolean":
            return "must be true or false"
        if schema.get("type") not in ("integer", "number"):
            return f"must be {cls.model_fields[name].description}"
        what = "an integer" if schema["type"] == "integer" else "a finite number"
        bounds = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
        limits = [f"{sign} {schema[key]:g}" for key, sign in bounds.items() if key in schema]
        return f"must be {what} {' and '.join(limits)}".rstrip()
