# SPDX-License-Identifier: Apache-2.0
"""The server on the fake runtime, as a program: `python fake_server.py DIRECTORY` prints its address and serves."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import uvicorn
import uvloop

from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store


async def main(directory: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    async with open_store(directory / "opensandbox.db", node="local", runtime="fake") as store:
        deps = Deps(store, FakeRuntime(), b"k" * 32, node="local", epoch=store.epoch)
        server = uvicorn.Server(uvicorn.Config(create_app(deps), log_level="warning"))
        print(f"127.0.0.1:{listener.getsockname()[1]}", flush=True)
        await server.serve(sockets=[listener])


if __name__ == "__main__":
    # As the real one: asyncio's own loop leaves Nagle's algorithm on for a socket it is given.
    uvloop.run(main(Path(sys.argv[1])))
