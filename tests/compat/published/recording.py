# SPDX-License-Identifier: Apache-2.0
"""Which methods of the published SDK a check calls, and how each call ended.

The classes are looked at from outside: whatever public they have is listed and wrapped. `python recording.py` prints
the list, and that of the commands of `osb`, as JSON.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

CALLS: list[tuple[str, str, str]] = []
"""Method, `ok` or the exception's name, and the method that called it (empty: the check itself)."""

_SERVICES = (
    "Commands", "Filesystem", "Metrics", "Health", "Diagnostics", "Egress", "CredentialVault", "IsolationService",
    "IsolationSession", "Codes",
)  # fmt: skip
_caller: ContextVar[str] = ContextVar("caller", default="")


def surface(sync: bool = False) -> dict[str, tuple[type, list[str]]]:
    """Each public class with the names of its methods and properties."""
    suffix, below = ("Sync", ".sync") if sync else ("", "")
    homes = dict.fromkeys(_SERVICES, f"opensandbox{below}.services")
    homes = {
        "Sandbox": f"opensandbox{below or '.sandbox'}",
        "SandboxManager": f"opensandbox{below or '.manager'}",
        **homes,
        "CodeInterpreter": f"code_interpreter{below}.code_interpreter",
        "Codes": f"code_interpreter{below}.services.code",
    }
    kinds = {name: getattr(importlib.import_module(home), name + suffix) for name, home in homes.items()}
    found = {
        name: (kind, [member for member in dir(kind) if not member.startswith("_")]) for name, kind in kinds.items()
    }
    # Closing has another name in each world, and does nothing.
    kind, members = found["CodeInterpreter"]
    found["CodeInterpreter"] = (kind, [name for name in members if name not in ("aclose", "close")])
    # The one is a part of the other.
    vault = set(found["CredentialVault"][1])
    found["Egress"] = (found["Egress"][0], [name for name in found["Egress"][1] if name not in vault])
    return found


def record(sync: bool) -> None:
    """From now on every call is noted."""
    for package in ("opensandbox", "code_interpreter"):
        importlib.import_module(f"{package}.sync.adapters.factory" if sync else f"{package}.adapters.factory")
    for name, (kind, members) in surface(sync).items():
        for implementation in _implementing(kind) if name in _SERVICES else {kind}:
            for member in members:
                if member in vars(implementation):
                    setattr(implementation, member, _noted(f"{name}.{member}", vars(implementation)[member]))


def _implementing(kind: type) -> set[type]:
    """A service, what implements it, and what that inherits from the package besides."""
    return {
        one
        for child in {kind, *_below(kind)}
        for one in child.__mro__
        if one.__module__.startswith(("opensandbox.", "code_interpreter."))
    }


def _below(kind: type) -> Iterator[type]:
    for child in kind.__subclasses__():
        yield child
        yield from _below(child)


def _noted(label: str, member: Any) -> Any:
    if isinstance(member, property):
        return property(_wrapped(label, member.fget))
    if isinstance(member, classmethod):
        return classmethod(_wrapped(label, member.__func__))
    return _wrapped(label, member) if callable(member) else member


def _wrapped(label: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
    assert function is not None
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def awaited(*arguments: Any, **options: Any) -> Any:
            with _Call(label):
                return await function(*arguments, **options)

        return awaited

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        with _Call(label):
            return function(*arguments, **options)

    return called


class _Call:
    def __init__(self, label: str) -> None:
        self._label = label

    def __enter__(self) -> None:
        self._above = _caller.get()
        self._token = _caller.set(self._above or self._label)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _caller.reset(self._token)
        CALLS.append((self._label, kind.__name__ if kind else "ok", self._above))


def commands() -> Iterator[str]:
    """Every command of the published command line."""
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="osb")
    waiting = [("", entry.load())]
    while waiting:
        path, command = waiting.pop(0)
        below = getattr(command, "commands", None)
        if below is None:
            yield path
        else:
            waiting += [(f"{path} {name}".strip(), child) for name, child in below.items()]


if __name__ == "__main__":
    members = {name: found for name, (_, found) in surface().items()}
    twins = {name: found for name, (_, found) in surface(sync=True).items()}
    assert members == twins, "the two halves of the published SDK differ"
    print(
        json.dumps(
            {"sdk": [f"{name}.{one}" for name, found in members.items() for one in found], "cli": list(commands())}
        )
    )
