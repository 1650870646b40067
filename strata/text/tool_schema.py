"""What a tool's JSON schema says about the type of each parameter."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ParameterTypes = frozenset[str] | None
"""JSON type names a parameter may have, or None when nothing is said."""

_DEEPEST_REFERENCE = 8


def parameter_types(tools: Sequence[Mapping[str, Any]] | None) -> Callable[[str, str], ParameterTypes]:
    """(function, parameter) -> types, for tools that `checked_tools` passed."""
    schemas = {}
    for tool in tools or ():
        function = tool["function"]
        schemas[function["name"]] = function.get("parameters") or {}

    def types(function: str, parameter: str) -> ParameterTypes:
        schema = schemas.get(function, {})
        properties = schema.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _types_of(found, schema, _DEEPEST_REFERENCE)

    return types


def _types_of(schema: object, root: Mapping[str, Any], depth: int) -> ParameterTypes:
    if not isinstance(schema, Mapping) or depth == 0:
        return None
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, Sequence):
        return frozenset(name for name in kind if isinstance(name, str))
    if "const" in schema:
        return frozenset((_type_of(schema["const"]),))
    if isinstance(schema.get("enum"), Sequence):
        return frozenset(map(_type_of, schema["enum"]))
    for union in ("anyOf", "oneOf"):
        if isinstance(schema.get(union), Sequence):
            parts = [_types_of(part, root, depth - 1) for part in schema[union]]
            return None if None in parts else frozenset().union(*parts)
    if isinstance(schema.get("$ref"), str):
        return _types_of(_referred(schema["$ref"], root), root, depth - 1)
    return None


def _referred(reference: str, root: Mapping[str, Any]) -> object:
    """The schema a local reference such as '#/$defs/Colour' points at, or None."""
    target: object = root
    if not reference.startswith("#/"):
        return None
    for step in reference[2:].split("/"):
        if not isinstance(target, Mapping):
            return None
        target = target.get(step.replace("~1", "/").replace("~0", "~"))
    return target


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        # The schema language counts 1.0 as an integer too.
        return "integer" if value.is_integer() else "number"
    if isinstance(value, str):
        return "string"
    return "object" if isinstance(value, Mapping) else "array"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def json_type(text: str) -> str | None:
    """The JSON type of `text`, or None where it is not JSON. NaN and Infinity are not."""
    try:
        return _type_of(json.loads(text, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        return None
