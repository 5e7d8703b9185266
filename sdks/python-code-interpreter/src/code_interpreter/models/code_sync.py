# SPDX-License-Identifier: Apache-2.0
"""The published names for synchronous programs; the values are the same."""

from code_interpreter.models.code import CodeContext as CodeContextSync
from code_interpreter.models.code import SupportedLanguage as SupportedLanguageSync

__all__ = ["CodeContextSync", "SupportedLanguageSync"]
