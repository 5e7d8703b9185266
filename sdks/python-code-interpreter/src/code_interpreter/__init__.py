# SPDX-License-Identifier: Apache-2.0
"""Code cells in OpenSandbox sandboxes: what one cell defines, the next one finds.

    from code_interpreter import CodeInterpreter
    from opensandbox import Sandbox

    async with await Sandbox.create("opensandbox/code-interpreter") as sandbox:
        interpreter = await CodeInterpreter.create(sandbox)
        await interpreter.codes.run("x = 20")
        print((await interpreter.codes.run("x + 1")).result[0].text)  # 21
        await sandbox.kill()

`CodeInterpreterSync` is the same for programs without an event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from code_interpreter.code_interpreter import CodeInterpreter
    from code_interpreter.models import CodeContext, SupportedLanguage
    from code_interpreter.sync import CodeInterpreterSync

__version__ = "1.2.0"

__all__ = ["CodeContext", "CodeInterpreter", "CodeInterpreterSync", "SupportedLanguage", "__version__"]

# Loaded when first asked for: whoever uses one of the two worlds does not pay for the other.
_HOME = {
    "CodeContext": "code_interpreter.models",
    "CodeInterpreter": "code_interpreter.code_interpreter",
    "CodeInterpreterSync": "code_interpreter.sync",
    "SupportedLanguage": "code_interpreter.models",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
