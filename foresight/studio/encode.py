"""JSON to and from browsers: numbers and texts that it has no signs for, and whole numbers that a page asks with."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from fastapi.responses import JSONResponse

from foresight.errors import UserError


def encode(document: object) -> bytes:
    """UTF-8 JSON. NaN and infinities become texts, as does what JSON does not know; lone surrogates are escaped."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    except ValueError:
        text = json.dumps(_finite(document), ensure_ascii=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "backslashreplace")


class Answer(JSONResponse):
    """A response with `encode`."""

    def render(self, content: Any) -> bytes:
        """The bytes of a document."""
        return encode(content)


def whole(document: dict[str, Any], name: str, default: int, least: int = -(2**31), most: int = 2**31) -> int:
    """The whole number `name` of a request. Raises UserError if it is none, or not between `least` and `most`."""
    value = document.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise UserError(f"{name} must be a whole number between {least:,} and {most:,}, not {value!r}.")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value


def number(value: object, otherwise: float = 0.0) -> float:
    """A number of a file that may hold anything."""
    return float(value) if is_number(value) else otherwise  # type: ignore[arg-type]  # checked


def is_number(value: object) -> bool:
    """Whether a value of a file is a number that a float can hold."""
    return isinstance(value, float) or (type(value) is int and abs(value) < sys.float_info.max)
