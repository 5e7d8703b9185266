# SPDX-License-Identifier: Apache-2.0
"""OpenSandbox: isolated machines for AI agents, on infrastructure you own.

    from opensandbox import Sandbox

    async with await Sandbox.create("host") as sandbox:
        execution = await sandbox.commands.run("echo hello")
        print(execution.text)
        await sandbox.kill()

`SandboxSync` is the same for programs without an event loop.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensandbox.config import ConnectionConfig, ConnectionConfigSync
    from opensandbox.exceptions import SandboxException
    from opensandbox.sandbox import Sandbox
    from opensandbox.sandboxes import SandboxManager
    from opensandbox.sync.sandbox import SandboxSync
    from opensandbox.sync.sandboxes import SandboxManagerSync

__version__ = "1.2.0"

__all__ = [
    "ConnectionConfig",
    "ConnectionConfigSync",
    "Sandbox",
    "SandboxException",
    "SandboxManager",
    "SandboxManagerSync",
    "SandboxSync",
    "__version__",
]

# Loaded when first asked for, so that a program which only wants the version or the exceptions
# (a command line's --help, say) does not pay for pydantic's models.
_HOME = {
    "ConnectionConfig": "opensandbox.config",
    "ConnectionConfigSync": "opensandbox.config",
    "Sandbox": "opensandbox.sandbox",
    "SandboxException": "opensandbox.exceptions",
    "SandboxManager": "opensandbox.sandboxes",
    "SandboxManagerSync": "opensandbox.sync.sandboxes",
    "SandboxSync": "opensandbox.sync.sandbox",
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
