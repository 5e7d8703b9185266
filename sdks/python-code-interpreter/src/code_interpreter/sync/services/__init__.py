# SPDX-License-Identifier: Apache-2.0
"""The parts of an interpreter."""

from code_interpreter.sync.services.code import CodesSync

__all__ = ["CodesSync"]
