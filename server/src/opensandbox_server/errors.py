# SPDX-License-Identifier: Apache-2.0
"""The one error every layer raises. Codes, kinds, statuses and default hints come from spec/errors.yaml.

>>> raise not_found(sandbox_id)                                              # doctest: +SKIP
>>> raise OpenSandboxError(Code.SANDBOX_INVALID_PARAMETER, "timeout is too long.")  # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .wire.errors import HINT, KIND, STATUS, Code

__all__ = [
    "CannotStart",
    "Code",
    "OpenSandboxError",
    "internal",
    "invalid",
    "not_found",
    "short",
    "unavailable",
    "unsupported_field",
    "violation",
]


class OpenSandboxError(Exception):
    """A failure that a client is told about: what went wrong, and what to do next."""

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        hint: str | None = None,
        details: dict[str, Any] | None = None,
        violations: Sequence[dict[str, Any]] = (),
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint if hint is not None else HINT[code]
        self.details = details
        self.violations = violations
        """Schema violations, shaped as published; only a body or query of the wrong shape has them."""
        self.retry_after = retry_after
        """Seconds after which it is worth trying again, if that can be told."""

    @property
    def kind(self) -> str:
        return KIND[self.code]

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class CannotStart(Exception):
    """The server cannot start, and what would let it: two lines on the terminal, no traceback."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def not_found(sandbox_id: str) -> OpenSandboxError:
    """No such sandbox, or not one of this caller's."""
    return OpenSandboxError(Code.SANDBOX_NOT_FOUND, f"There is no sandbox {short(sandbox_id)}.")


def invalid(message: str, *, hint: str | None = None) -> OpenSandboxError:
    """A field has the right shape and a value that makes no sense."""
    return OpenSandboxError(Code.SANDBOX_INVALID_PARAMETER, message, hint=hint)


def unsupported_field(runtime: str, field: str, *, hint: str | None = None) -> OpenSandboxError:
    """A known field that this runtime cannot honour: refused, never ignored."""
    return OpenSandboxError(
        Code.SANDBOX_API_NOT_SUPPORTED,
        f"The {runtime} runtime cannot honour {field}.",
        hint=hint,
        details={"runtime": runtime, "field": field},
    )


def unavailable(message: str, *, hint: str | None = None) -> OpenSandboxError:
    """The part of the machine that makes sandboxes does not answer right now."""
    return OpenSandboxError(Code.NODE_UNAVAILABLE, message, hint=hint)


def internal(message: str) -> OpenSandboxError:
    """Our fault. The message must be fit for a stranger: details go to the log."""
    return OpenSandboxError(Code.SANDBOX_INTERNAL_ERROR, message)


def violation(message: str, loc: Sequence[str | int] = ("body",), kind: str = "value_error") -> OpenSandboxError:
    """One rule on the shape of a request that the schema alone cannot say; 422 with the published `detail` list."""
    return OpenSandboxError(
        Code.GENERAL_INVALID_REQUEST,
        message,
        violations=[{"type": kind, "loc": list(loc), "msg": f"Value error, {message}"}],
    )


def short(text: str) -> str:
    """What a client named, no longer than a message can bear."""
    return text if len(text) <= 64 else f"{text[:61]}..."
