# SPDX-License-Identifier: Apache-2.0
"""Everything the SDK raises.

* SandboxException
  x SandboxApiException            the server or the sandbox answered with an error
    - InvalidRequestException        400, 422: the request cannot be honoured as it stands
    - AuthenticationException        401: no key or token, or a wrong one
    - PermissionDeniedException      403
    - NotFoundException              404
    - ConflictException              409: the thing is in a state that does not allow it
    - SandboxRateLimitException      429: a limit is reached
    - UnsupportedException           501, some 400: this runtime cannot do it
    - UnavailableException           502, 503, 504: something that is needed does not answer
    - ServerException                500: our fault; the log has the details under the request id
  x SandboxInternalException       the answer could not be had or understood
    - SandboxConnectionException     no connection, or it broke
    - SandboxTimeoutException        no answer in time
  x SandboxReadyTimeoutException   the sandbox did not become ready in time
  x SandboxUnhealthyException      the sandbox is there but cannot be used
  x InvalidArgumentException       refused before anything was sent

Each carries `code`, `message`, `hint`, `request_id` and `status`; `str()` shows them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensandbox.models import Execution

__all__ = [
    "AuthenticationException",
    "ConflictException",
    "InvalidArgumentException",
    "InvalidRequestException",
    "NotFoundException",
    "PermissionDeniedException",
    "SandboxApiException",
    "SandboxConnectionException",
    "SandboxError",
    "SandboxException",
    "SandboxInternalException",
    "SandboxRateLimitException",
    "SandboxReadyTimeoutException",
    "SandboxTimeoutException",
    "SandboxUnhealthyException",
    "ServerException",
    "UnavailableException",
    "UnsupportedException",
]


class SandboxError:
    """The machine-readable part of a failure: a code, a message, what to do next.

    Codes of the server and of the sandbox are listed in the platform's error reference; the
    constants here are the ones the SDK itself gives.
    """

    INTERNAL_UNKNOWN_ERROR = "INTERNAL_UNKNOWN_ERROR"
    READY_TIMEOUT = "READY_TIMEOUT"
    UNHEALTHY = "UNHEALTHY"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    UNEXPECTED_RESPONSE = "UNEXPECTED_RESPONSE"
    TIMEOUT = "TIMEOUT"
    CONNECTION = "CONNECTION"
    RATE_LIMIT = "RATE_LIMIT"

    def __init__(self, code: str, message: str | None = None, hint: str | None = None) -> None:
        self.code = code
        self.message = message
        self.hint = hint

    def __repr__(self) -> str:
        return f"SandboxError(code={self.code!r}, message={self.message!r}, hint={self.hint!r})"


class SandboxException(Exception):
    """The base of every error of this SDK."""

    default_code = SandboxError.INTERNAL_UNKNOWN_ERROR

    def __init__(
        self,
        message: str | None = None,
        cause: Exception | None = None,
        error: SandboxError | None = None,
        request_id: str | None = None,
        is_retryable: bool = False,
        *,
        hint: str | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.error = error or SandboxError(self.default_code, message, hint)
        self.message = message or self.error.message or ""
        self.hint = hint or self.error.hint
        self.request_id = request_id
        self.status = status
        self.is_retryable = is_retryable
        if cause is not None:
            self.__cause__ = cause

    @property
    def code(self) -> str:
        """The error code, such as `SANDBOX::NOT_FOUND`."""
        return self.error.code

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}" if self.message else f"[{self.code}]"
        facts = [f"HTTP {self.status}" if self.status else "", f"request {self.request_id}" if self.request_id else ""]
        facts = [fact for fact in facts if fact]
        if facts:
            text += f" ({', '.join(facts)})"
        # Messages end without a full stop, so the hint has a separator of its own; on one line, for logs.
        return f"{text} — hint: {self.hint}" if self.hint else text


class SandboxApiException(SandboxException):
    """The server, or the daemon in the sandbox, answered with an error."""

    default_code = SandboxError.UNEXPECTED_RESPONSE

    def __init__(
        self,
        message: str | None = None,
        cause: Exception | None = None,
        status_code: int | None = None,
        error: SandboxError | None = None,
        request_id: str | None = None,
        response_body: bytes | None = None,
        is_retryable: bool = False,
        *,
        hint: str | None = None,
        retry_after: timedelta | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(message, cause, error, request_id, is_retryable, hint=hint, status=status_code)
        self.status_code = status_code
        self.response_body = response_body
        self.retry_after = retry_after
        self.details = details or {}


class InvalidRequestException(SandboxApiException):
    """The request cannot be honoured as it stands; the message names the field."""


class AuthenticationException(SandboxApiException):
    """No key or token was sent, or a wrong one."""


class PermissionDeniedException(SandboxApiException):
    """The caller is known, but not allowed this."""


class NotFoundException(SandboxApiException):
    """No such sandbox, command, file or image, or it is not visible to this caller."""


class ConflictException(SandboxApiException):
    """The thing is in a state that does not allow it."""


class SandboxRateLimitException(SandboxApiException):
    """A limit is reached.

    `retry_after` is the time after which to try again, and `queue_position` how many wait already, if the server
    says so.
    """

    default_code = SandboxError.RATE_LIMIT

    @property
    def queue_position(self) -> int | None:
        """The place in the queue at which the server would have put this request."""
        position = self.details.get("queuePosition")
        return position if isinstance(position, int) else None


class UnsupportedException(SandboxApiException):
    """This runtime, or this sandbox, cannot do it."""


class UnavailableException(SandboxApiException):
    """Something that is needed does not answer right now."""


class ServerException(SandboxApiException):
    """An internal error; the server's log has the details under the request id."""


class SandboxInternalException(SandboxException):
    """No answer could be had, or it could not be understood."""

    def __init__(
        self,
        message: str | None = None,
        cause: Exception | None = None,
        error: SandboxError | None = None,
        is_retryable: bool = False,
        *,
        hint: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message, cause, error, request_id, is_retryable, hint=hint)


class SandboxTimeoutException(SandboxInternalException):
    """No answer within `ConnectionConfig.request_timeout`."""

    default_code = SandboxError.TIMEOUT


class SandboxConnectionException(SandboxInternalException):
    """The server or the sandbox cannot be reached, or the connection broke.

    When it broke under a running command, `execution` has the id of the command and the output until then.
    """

    default_code = SandboxError.CONNECTION

    execution: Execution | None = None


class SandboxUnhealthyException(SandboxException):
    """The sandbox exists but cannot be used; the message says why."""

    default_code = SandboxError.UNHEALTHY


class SandboxReadyTimeoutException(SandboxException):
    """The sandbox did not become ready in the time that was given."""

    default_code = SandboxError.READY_TIMEOUT


class InvalidArgumentException(SandboxException):
    """An argument was refused before anything was sent."""

    default_code = SandboxError.INVALID_ARGUMENT


_BY_STATUS: dict[int, type[SandboxApiException]] = {
    400: InvalidRequestException,
    401: AuthenticationException,
    403: PermissionDeniedException,
    404: NotFoundException,
    405: InvalidRequestException,
    409: ConflictException,
    416: InvalidRequestException,
    422: InvalidRequestException,
    429: SandboxRateLimitException,
    500: ServerException,
    501: UnsupportedException,
    502: UnavailableException,
    503: UnavailableException,
    504: UnavailableException,
}


def class_of_status(status: int) -> type[SandboxApiException]:
    """The exception class for an answer with that status."""
    return _BY_STATUS.get(status, SandboxApiException)
