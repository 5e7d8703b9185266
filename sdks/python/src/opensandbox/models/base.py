# SPDX-License-Identifier: Apache-2.0
"""What the values have in common."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AliasGenerator, BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic.alias_generators import to_camel

from opensandbox.exceptions import SandboxError, SandboxInternalException

T = TypeVar("T")


class Value(BaseModel):
    """A value of this SDK.

    The schema is built at first use: most programs touch a handful of these classes, and building
    all of them would double the time of the import.
    """

    model_config = ConfigDict(defer_build=True, populate_by_name=True)


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


def dump(model: BaseModel | None) -> dict[str, Any] | None:
    """A value as the server's JSON wants it, without what was not given."""
    return None if model is None else model.model_dump(mode="json", by_alias=True, exclude_none=True)
