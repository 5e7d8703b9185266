# SPDX-License-Identifier: Apache-2.0
"""Contexts and languages."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from opensandbox.exceptions import InvalidArgumentException
from opensandbox.executions import milliseconds


class SupportedLanguage:
    """Names of languages. Which of them a sandbox has, it says when it is asked for another."""

    PYTHON = "python"
    JAVA = "java"
    GO = "go"
    TYPESCRIPT = "typescript"
    BASH = "bash"
    JAVASCRIPT = "javascript"


class CodeContext(BaseModel):
    """A context: what its cells define stays there, apart from all others.

    >>> CodeContext(language="python").id is None  # the default context of the language
    True
    """

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    language: str
    cwd: str | None = None
    """The directory its cells are in."""
    created_at: datetime | None = None
    busy: bool | None = None
    """Whether a cell runs in it."""

    @field_validator("language")
    @classmethod
    def _some_language(cls, language: str) -> str:
        if not language.strip():
            raise ValueError("the language is empty")
        return language


def run_request(
    code: str,
    language: str | None,
    context: CodeContext | None,
    timeout: timedelta | None,
    envs: dict[str, str] | None,
) -> dict[str, Any]:
    """The body of the request that runs a cell."""
    if not code.strip():
        raise InvalidArgumentException("the code is empty")
    if context is not None and language is not None and language != context.language:
        raise InvalidArgumentException(
            f"the context is one of {context.language}, not of {language}", hint="Give one of the two."
        )
    where = {"language": context.language if context is not None else language or SupportedLanguage.PYTHON}
    if context is not None and context.id is not None:
        where["id"] = context.id
    body: dict[str, Any] = {"code": code, "context": where}
    limit = milliseconds(timeout)
    if limit is not None:
        body["timeout"] = limit
    if envs:
        body["envs"] = envs
    return body
