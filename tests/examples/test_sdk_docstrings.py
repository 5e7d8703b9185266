# SPDX-License-Identifier: Apache-2.0
"""Every example in a docstring of the SDK runs against a real server, in both worlds."""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import pkgutil
import re
import textwrap
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import opensandbox
from live_server import LiveServer
from opensandbox import (
    ConnectionConfig,
    ConnectionConfigSync,
    Sandbox,
    SandboxManager,
    SandboxManagerSync,
    SandboxSync,
    models,
)

# An example is a paragraph that is indented deeper than the text around it.
BLOCK = re.compile(r"(?<=\n\n)(?: {4}.*\n?|\n(?= {4}))+")

# Some of them need it, and it is no hindrance to the others.
ISOLATION = {"bootstrap.execd.isolation": "enable"}


def _doc(thing: Any) -> str:
    # Its own: an inherited one was seen where it is written.
    return inspect.cleandoc(thing.__doc__ or "")


def documented(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Names and docstrings of what a module itself defines."""
    yield module.__name__, _doc(module)
    for name, thing in vars(module).items():
        if name.startswith("_") or not inspect.isclass(thing) or thing.__module__ != module.__name__:
            continue
        yield f"{module.__name__}.{name}", _doc(thing)
        for method, function in vars(thing).items():
            if not method.startswith("_") and callable(getattr(thing, method)):
                yield (
                    f"{module.__name__}.{name}.{method}",
                    _doc(getattr(function, "__func__", function)),
                )


def examples() -> Iterator[Any]:
    for found in pkgutil.walk_packages(opensandbox.__path__, "opensandbox."):
        for name, text in documented(importlib.import_module(found.name)):
            for block in BLOCK.findall(text):
                yield pytest.param(textwrap.dedent(block), id=name)
    yield pytest.param(BLOCK.findall(_doc(opensandbox))[0], id="opensandbox")


EXAMPLES = list(examples())


def test_the_twins_have_the_same_examples() -> None:
    names = {str(example.id) for example in EXAMPLES}
    synchronous = {name for name in names if name.startswith("opensandbox.sync.")}
    assert len(synchronous) >= 6
    assert not [
        example.id for example in EXAMPLES if example.id in synchronous and re.search("async|await", example.values[0])
    ]
    without = {re.sub(r"Sync\b", "", name.replace(".sync", "")) for name in synchronous}
    assert without <= names


@pytest.mark.parametrize("program", EXAMPLES)
def test_example(server: LiveServer, program: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPEN_SANDBOX_DOMAIN", server.address)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {name: getattr(models, name) for name in models.__all__}
    names |= {thing.__name__: thing for thing in (ConnectionConfig, ConnectionConfigSync, timedelta)}
    program = textwrap.dedent(program)
    code = compile(program, "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if "await " in program or "async " in program:
        asyncio.run(_asynchronous(code, names))
    else:
        with SandboxSync.create("host", extensions=ISOLATION) as sandbox, SandboxManagerSync.create() as manager:
            exec(code, names | {"SandboxSync": SandboxSync, "SandboxManagerSync": SandboxManagerSync}
                 | {"sandbox": sandbox, "manager": manager})  # fmt: skip
        for info in SandboxManagerSync.create().list_sandbox_infos().sandbox_infos:
            server.delete(info.id)


async def _asynchronous(code: Any, names: dict[str, Any]) -> None:
    async with await SandboxManager.create() as manager:
        async with await Sandbox.create("host", extensions=ISOLATION) as sandbox:
            names |= {"Sandbox": Sandbox, "SandboxManager": SandboxManager, "sandbox": sandbox, "manager": manager}
            outcome = eval(code, names)
            if inspect.isawaitable(outcome):
                await outcome
        for info in (await manager.list_sandbox_infos()).sandbox_infos:
            await manager.kill_sandbox(info.id)
