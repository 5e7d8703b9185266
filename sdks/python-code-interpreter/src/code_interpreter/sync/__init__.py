# SPDX-License-Identifier: Apache-2.0
"""The interpreter for programs without an event loop."""

from code_interpreter.sync.code_interpreter import CodeInterpreterSync

__all__ = ["CodeInterpreterSync"]
