# SPDX-License-Identifier: Apache-2.0
"""What the values have in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    AliasGenerator,
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel

from opensandbox.exceptions import InvalidArgumentException, SandboxError, SandboxInternalException

T = TypeVar("T")
M = TypeVar("M", bound="Value")


class Value(BaseModel):
    """A value of this SDK.

    The schema is built at first use: most programs touch a handful of these classes, and building
    all of them would double the time of the import.
    """

    model_config = ConfigDict(defer_build=True, populate_by_name=True)


class Asked(Value):
    """A value that programs make and that no server sends: a field that it does not have is a mistake."""

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, fields: object) -> object:
        known = {alias: name for name, field in cls.model_fields.items() for alias in (name, field.alias or name)}
        for name in fields if isinstance(fields, dict) else ():
            if name not in known:
                raise ValueError(f"there is no field {name!r:.100}; {_meant(str(name), sorted(cls.model_fields))}")
        return fields


# How other tools, and other calls of this SDK, name the same thing.
_OTHER_NAMES = {
    "cwd": "working_directory", "workdir": "working_directory", "env": "envs", "environment": "envs", "user": "uid",
    "group": "gid", "permissions": "mode", "content": "data", "old": "old_content", "new": "new_content",
    "glob": "pattern", "state": "states", "size": "page_size",
}  # fmt: skip


def _meant(name: str, known: list[str]) -> str:
    from difflib import get_close_matches

    other = _OTHER_NAMES.get(name.lower())
    found = [other] if other in known else get_close_matches(name, known, 1)
    return f"write {found[0]}" if found else f"those are {', '.join(known)}"


class Answer(Value):
    """A value read from the server's camelCase JSON; in Python, and when dumped, it is snake_case."""

    model_config = ConfigDict(alias_generator=AliasGenerator(validation_alias=to_camel))


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must not be blank")
    return text


def _octal_digits(mode: int) -> int:
    if mode < 0 or mode > 7777 or set(str(mode)) & {"8", "9"}:
        raise ValueError("write the mode with its octal digits as a plain number: 644 means rw-r--r--")
    return mode


NotBlank = Annotated[str, AfterValidator(_not_blank)]
Mode = Annotated[int, AfterValidator(_octal_digits)]


def parse(kind: type[T], body: bytes) -> T:
    """Read an answer."""
    try:
        value: T = _adapter(kind).validate_json(body)  # type: ignore[arg-type]  # every type is hashable
    except ValidationError as error:
        raise SandboxInternalException(
            f"the answer is not a {getattr(kind, '__name__', kind)}: {error}",
            error,
            SandboxError(
                SandboxError.UNEXPECTED_RESPONSE, hint="Is this an OpenSandbox server, and not much newer than the SDK?"
            ),
        ) from error
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def of_arguments(kind: type[M], hint: str, **fields: Any) -> M:
    """A value made of the arguments of a call; what it refuses is an error of that call, and `hint` a right one."""
    try:
        return kind(**fields)
    except ValidationError as error:
        # Without the input itself, which may be a secret or very long.
        why = {
            f"{detail['loc'][0] if detail['loc'] else kind.__name__}: {detail['msg'].removeprefix('Value error, ')}"
            for detail in error.errors(include_url=False, include_context=False, include_input=False)
        }
        raise InvalidArgumentException("; ".join(sorted(why)), error, hint=hint) from error


def expect(value: object, kind: type[Value]) -> None:
    """Refuse what is not a value of that kind, such as a plain dictionary."""
    if not isinstance(value, kind):
        name = kind.__name__
        raise InvalidArgumentException(
            f"this takes a {name}, not {type(value).__name__}",
            hint=f"Write {name}(...), from opensandbox.models; {name}.model_validate({{...}}) makes it of a dict.",
        )


def expect_each(values: Sequence[object], kind: type[Value]) -> None:
    """Refuse what is not a list of such values."""
    if not isinstance(values, (list, tuple)):
        raise InvalidArgumentException(
            f"this takes a list of {kind.__name__}, not {type(values).__name__}", hint=f"Write [{kind.__name__}(...)]."
        )
    for value in values:
        expect(value, kind)


def dump(model: Value | None, kind: type[Value]) -> dict[str, Any] | None:
    """A value of that kind as the server's JSON wants it, without what was not given."""
    if model is None:
        return None
    expect(model, kind)
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)
