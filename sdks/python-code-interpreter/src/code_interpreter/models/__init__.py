# SPDX-License-Identifier: Apache-2.0
"""The values that go into the calls and come out of them."""

from code_interpreter.models.code import CodeContext, SupportedLanguage

__all__ = ["CodeContext", "SupportedLanguage"]
