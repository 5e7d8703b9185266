# SPDX-License-Identifier: Apache-2.0
"""Bodies in, answers out: strict JSON, no nulls, and one shape for every error."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from opensandbox_server.errors import Code, OpenSandboxError

from . import request_id

log = logging.getLogger(__name__)

LARGEST_BODY = 4 * 1024 * 1024

M = TypeVar("M", bound=BaseModel)


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON. What there is nothing to say about must be absent from `content`: published clients cannot read null."""
    return Response(to_json(content), status, headers, media_type="application/json")


async def body(request: Request, model: type[M]) -> M:
    """The body as that type; 422 in the published form if it is not one."""
    raw = await _read(request)
    if not raw:
        raise _malformed([{"type": "missing", "loc": ["body"], "msg": "Field required"}])
    try:
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        context = {"error": str(error)}
        raise _malformed(
            [{"type": "json_invalid", "loc": ["body"], "msg": "JSON decode error", "ctx": context}]
        ) from None
    try:
        return model.model_validate(content)
    except ValidationError as error:
        raise _malformed(_violations(error.errors(include_url=False), ("body",))) from None


async def _read(request: Request) -> bytes:
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > LARGEST_BODY:
            raise OpenSandboxError(
                Code.GENERAL_INVALID_REQUEST,
                "The body is larger than 4 MiB.",
                hint="Upload files to the sandbox instead.",
            )
    return bytes(chunks)


def error_answer(error: OpenSandboxError, **extra: Any) -> Response:
    """The one shape."""
    content: dict[str, Any] = {"code": error.code.value, "message": error.message}
    if error.hint:
        content["hint"] = error.hint
    if error.details:
        content["details"] = error.details
    if identity := request_id.current.get():
        content["requestId"] = identity
    if error.violations:
        content["detail"] = list(error.violations)
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after is not None else None
    return answer({**content, **extra}, error.status, headers)


def refused(error: OpenSandboxError, request: Request) -> Response:
    """The answer to a request that failed; what is our fault is logged."""
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("request %s: %s %s: %s", request_id.current.get(), request.method, request.url.path, error)
    return error_answer(error)


def register_handlers(app: FastAPI) -> None:
    """Every way a request can fail, in the one shape."""

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, OpenSandboxError)
        return refused(error, request)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return error_answer(_malformed(_violations(error.errors())))

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        refusal = error_answer(_translated(request, error), detail=str(error.detail))
        refusal.headers.update(error.headers or {})
        return refusal

    app.add_exception_handler(OpenSandboxError, ours)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, framework)


class UnhandledErrors:
    """What nobody expected: the log gets all of it, the client the request id to ask with."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except ClientDisconnect:
            log.debug("request %s: its client left before it was sent", request_id.current.get())
        except Exception:
            log.exception("request %s: %s %s failed", request_id.current.get(), scope["method"], scope["path"])
            if started:
                raise  # nothing can be said any more but by breaking the connection
            refusal = error_answer(OpenSandboxError(Code.GENERAL_UNKNOWN_ERROR, "Something went wrong on our side."))
            await refusal(scope, receive, send)


def _translated(request: Request, error: HTTPException) -> OpenSandboxError:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return OpenSandboxError(Code.GENERAL_NOT_FOUND, f"There is no route {request.url.path[:200]}.")
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        return OpenSandboxError(
            Code.GENERAL_METHOD_NOT_ALLOWED, f"{request.url.path[:200]} does not take {request.method}."
        )
    log.error("an HTTP error that is none of ours: %s", error)
    return OpenSandboxError(Code.GENERAL_UNKNOWN_ERROR, "Something went wrong on our side.")


def _malformed(violations: list[dict[str, Any]]) -> OpenSandboxError:
    first = violations[0]
    where = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    # The default hint speaks of the body.
    hint = None if first["loc"][0] == "body" else "Compare the address and its parameters with /openapi.json."
    return OpenSandboxError(
        Code.GENERAL_INVALID_REQUEST, f"{where}: {first['msg']}{more}", hint=hint, violations=violations
    )


_SECRET = frozenset({"auth", "env", "password"})
_MOST_VIOLATIONS = 20


def _violations(errors: Iterable[Any], prefix: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The published `detail` list. What the caller sent is shown only if it is short and no secret."""
    shown = []
    for error in list(errors)[:_MOST_VIOLATIONS]:
        loc = [*prefix, *error["loc"]]
        entry = {"type": error["type"], "loc": loc, "msg": error["msg"]}
        value = error.get("input")
        if isinstance(value, str | int | float) and len(str(value)) <= 200 and not _SECRET.intersection(map(str, loc)):
            entry["input"] = value
        if context := error.get("ctx"):
            entry["ctx"] = {
                key: value if isinstance(value, int | float) else str(value) for key, value in context.items()
            }
        shown.append(entry)
    return shown
