# SPDX-License-Identifier: Apache-2.0
"""Prints the public surface of whichever `opensandbox` this interpreter has, as JSON.

    python signatures.py opensandbox.sandbox:Sandbox opensandbox.models:Volume ...

Of a class: its methods with their parameters, its properties, its fields if it is a model.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from typing import Any


def surface(home: str, name: str) -> dict[str, Any]:
    """What programs can use of a class."""
    kind = getattr(importlib.import_module(home), name)
    fields = getattr(kind, "model_fields", {})
    # Of a model, what it inherits and its validators are nothing that programs call.
    decorators = getattr(kind, "__pydantic_decorators__", None)
    validators = (
        {
            name
            for found in (getattr(decorators, kind_of) for kind_of in decorators.__dataclass_fields__)
            for name in found
        }
        if decorators
        else set()
    )
    inherited = validators | {
        name for base in kind.__mro__ if base.__module__.startswith("pydantic") for name in dir(base)
    }
    members: dict[str, Any] = {}
    for member in dir(kind):
        value = inspect.getattr_static(kind, member)
        special = member in ("__enter__", "__exit__", "__aenter__", "__aexit__", "__iter__", "__aiter__")
        if (member.startswith("_") and not special) or member in inherited or member in fields:
            continue
        if isinstance(value, property):
            members[member] = "property"
        elif callable(getattr(kind, member)):
            members[member] = parameters(getattr(kind, member))
    return {"members": members, "fields": {name: field.is_required() for name, field in fields.items()}}


def parameters(function: Any) -> list[list[Any]]:
    """Each parameter: its name, whether it must be given, whether only by keyword."""
    found = inspect.signature(function).parameters.values()
    return [
        [one.name, one.default is one.empty, one.kind is one.KEYWORD_ONLY]
        for one in found
        if one.name not in ("self", "cls")
    ]


def main() -> None:
    out = {}
    for place in sys.argv[1:]:
        home, _, name = place.partition(":")
        out[place] = surface(home, name)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
