# SPDX-License-Identifier: Apache-2.0
"""The generator of the synchronous SDK: its rules, on sources small enough to read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import generate_sync

HEAD = "# SPDX-License-Identifier: Apache-2.0\n"


def twin(source: str) -> str:
    return generate_sync.synchronous(HEAD + source, "# mark\n").removeprefix(HEAD + "# mark\n")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("async def f() -> None:\n    await g()\n", "def f() -> None:\n    g()\n"),
        ("x = (await f(1)).y\n", "x = f(1).y\n"),
        ("x = (await f)[0] + g(await h())\n", "x = f[0] + g(h())\n"),
        ("x = g((await h()) + 1)\n", "x = g((h()) + 1)\n"),
        ("async with a as b, c:\n    pass\n", "with a as b, c:\n    pass\n"),
        ("y = [x async for x in z]\n", "y = [x for x in z]\n"),
        ("H = Callable[[Sandbox], Awaitable[list[bool]]]\n", "H = Callable[[SandboxSync], list[bool]]\n"),
        ("x: AsyncGenerator[dict[str, int], None]\n", "x: Generator[dict[str, int], None, None]\n"),
        ("class A:\n    async def __aexit__(self): ...\n", "class A:\n    def __exit__(self): ...\n"),
        ('"""`await Sandbox.create()`, `async with` it; Files and Commands."""\n',
         '"""`SandboxSync.create()`, `with` it; Files and Commands."""\n'),
        ('__all__ = ["Commands", "SandboxError"]\n', '__all__ = ["CommandsSync", "SandboxError"]\n'),
        ("x = 1  # await Sandbox.kill()\n", "x = 1  # SandboxSync.kill()\n"),
        # Words that only contain one of ours stay.
        ("awaited = asynchronous = SandboxInfo\n", "awaited = asynchronous = SandboxInfo\n"),
    ],
)  # fmt: skip
def test_words(source: str, expected: str) -> None:
    assert twin(source) == expected


def test_imports_lead_to_the_twin_and_none_is_left_over() -> None:
    source = (
        "from collections.abc import Awaitable, Callable\n\n"
        "from opensandbox import models\n"
        "from opensandbox.exceptions import SandboxException\n"
        "from opensandbox.sandbox import Sandbox\n\n"
        "X: Callable[[Sandbox], Awaitable[models.SandboxInfo]] | SandboxException\n"
    )
    assert twin(source) == (
        "from collections.abc import Callable\n\n"
        "from opensandbox import models\n"
        "from opensandbox.exceptions import SandboxException\n"
        "from opensandbox.sync.sandbox import SandboxSync\n\n"
        "X: Callable[[SandboxSync], models.SandboxInfo] | SandboxException\n"
    )


def test_what_needs_an_event_loop_is_left_out() -> None:
    source = (
        "import asyncio\n\n\n"
        "# Asynchronous only: a reason\n@mark\ndef test_a():\n    asyncio.run(f())\n\n\n"
        "@pytest.mark.anyio\nasync def test_b():\n    await g()\n"
    )
    assert twin(source).lstrip() == "def test_b():\n    g()\n"


def test_nothing_asynchronous_is_left_anywhere() -> None:
    for path, text in generate_sync.modules(Path(__file__).resolve().parents[2]):
        for word in ("async ", "await ", "asyncio", "anyio", "AsyncC", "Awaitable"):
            assert word not in text, f"{path.name}: {word}"
