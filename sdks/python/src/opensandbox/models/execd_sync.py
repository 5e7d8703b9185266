# SPDX-License-Identifier: Apache-2.0
"""What synchronous programs give to commands."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import field_validator

from opensandbox.models.execd import (
    ExecutionComplete,
    ExecutionError,
    ExecutionHandlers,
    ExecutionInit,
    ExecutionNotice,
    ExecutionResult,
    OutputBytes,
    OutputMessage,
)

__all__ = ["ExecutionHandlersSync"]


class ExecutionHandlersSync(ExecutionHandlers):
    """Called as events arrive, in the thread that waits for the command."""

    on_stdout: Callable[[OutputMessage], None] | None = None
    on_stderr: Callable[[OutputMessage], None] | None = None
    on_output: Callable[[OutputBytes], None] | None = None
    on_result: Callable[[ExecutionResult], None] | None = None
    on_execution_complete: Callable[[ExecutionComplete], None] | None = None
    on_error: Callable[[ExecutionError], None] | None = None
    on_init: Callable[[ExecutionInit], None] | None = None
    on_notice: Callable[[ExecutionNotice], None] | None = None

    @field_validator("*")
    @classmethod
    def _nothing_to_await(cls, handler: Any) -> Any:
        if inspect.iscoroutinefunction(handler):
            raise ValueError("an asynchronous function would never run here; give a plain one")
        return handler
