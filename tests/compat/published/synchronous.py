# SPDX-License-Identifier: Apache-2.0
"""The synchronous half of the published SDK, once through."""

from __future__ import annotations

import asyncio

from checks import check, run
from world import opened

from opensandbox import Sandbox, SandboxSync
from opensandbox.config import ConnectionConfigSync
from opensandbox.models import WriteEntry


@check
async def synchronous_sdk(sandbox: Sandbox) -> None:
    def use() -> None:
        made = SandboxSync.create("host", connection_config=ConnectionConfigSync())
        try:
            assert made.commands.run("echo hi").logs.stdout[0].text == "hi"
            made.files.write_files([WriteEntry(path="/tmp/s.txt", data="sync", mode=644)])
            assert made.files.read_file("/tmp/s.txt") == "sync"
            assert b"".join(made.files.read_bytes_stream("/tmp/s.txt")) == b"sync"
            assert made.is_healthy()
            assert made.get_info().status.state == "Running"
        finally:
            made.kill()
            made.close()

    await asyncio.to_thread(use)


run(opened)
