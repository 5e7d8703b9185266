# SPDX-License-Identifier: Apache-2.0
"""OpenSandbox: isolated machines for AI agents, on infrastructure you own.

from opensandbox import Sandbox

async with await Sandbox.create("host") as sandbox:
    execution = await sandbox.commands.run("echo hello")
    print(execution.text)
    await sandbox.kill()
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig
    from opensandbox.exceptions import SandboxException
    from opensandbox.sandbox import Sandbox
    from opensandbox.sandboxes import SandboxManager

__version__ = "1.2.0"

__all__ = ["ConnectionConfig", "Sandbox", "SandboxException", "SandboxManager", "__version__"]

# Loaded when first asked for, so that a program which only wants the version or the exceptions
# (a command line's --help, say) does not pay for pydantic's models.
_HOME = {
    "ConnectionConfig": "opensandbox.config",
    "Sandbox": "opensandbox.sandbox",
    "SandboxException": "opensandbox.exceptions",
    "SandboxManager": "opensandbox.sandboxes",
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
