# SPDX-License-Identifier: Apache-2.0
"""Everything is where published programs look for it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("code_interpreter", ["CodeContext", "CodeInterpreter", "CodeInterpreterSync", "SupportedLanguage"]),
        ("code_interpreter.code_interpreter", ["CodeInterpreter"]),
        ("code_interpreter.models", ["CodeContext", "SupportedLanguage"]),
        ("code_interpreter.models.code", ["CodeContext", "SupportedLanguage"]),
        ("code_interpreter.models.code_sync", ["CodeContextSync", "SupportedLanguageSync"]),
        ("code_interpreter.services", ["Codes"]),
        ("code_interpreter.services.code", ["Codes"]),
        ("code_interpreter.sync", ["CodeInterpreterSync"]),
        ("code_interpreter.sync.code_interpreter", ["CodeInterpreterSync"]),
        ("code_interpreter.sync.services.code", ["CodesSync"]),
    ],
)
def test_names(module: str, names: list[str]) -> None:
    home = importlib.import_module(module)
    assert [name for name in names if not hasattr(home, name)] == []


def test_languages() -> None:
    from code_interpreter import SupportedLanguage

    names = {name: value for name, value in vars(SupportedLanguage).items() if name.isupper()}
    assert names == {name: name.lower() for name in ("PYTHON", "JAVA", "GO", "TYPESCRIPT", "BASH", "JAVASCRIPT")}


def test_importing_it_loads_nothing() -> None:
    code = "import code_interpreter, sys; print([m for m in ('pydantic', 'opensandbox.sandbox') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
    with pytest.raises(AttributeError):
        _ = importlib.import_module("code_interpreter").nothing
