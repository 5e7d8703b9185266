# SPDX-License-Identifier: Apache-2.0
"""The parts of an interpreter."""

from code_interpreter.services.code import Codes

__all__ = ["Codes"]
