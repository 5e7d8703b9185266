# SPDX-License-Identifier: Apache-2.0
"""The same SDK for programs without an event loop. Generated from the asynchronous one, so the two are alike.

    from opensandbox.sync import SandboxSync

    with SandboxSync.create("host") as sandbox:
        print(sandbox.commands.run("echo hello").text)
        sandbox.kill()

Sandboxes may be shared by threads.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensandbox.sync.sandbox import SandboxSync
    from opensandbox.sync.sandboxes import SandboxManagerSync

__all__ = ["SandboxManagerSync", "SandboxSync"]

_HOME = {"SandboxManagerSync": "opensandbox.sync.sandboxes", "SandboxSync": "opensandbox.sync.sandbox"}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
