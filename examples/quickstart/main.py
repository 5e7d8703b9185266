# SPDX-License-Identifier: Apache-2.0
"""The first program: a sandbox, a command, a file there and back.

    opensandbox-server &
    python examples/quickstart/main.py [IMAGE [ENTRY POINT]]

It runs as it stands with this repository's SDK and with the published one.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from opensandbox import Sandbox
from opensandbox.models import WriteEntry

IMAGE = "opensandbox/code-interpreter:v1.0.2"
ENTRY_POINT = "/opt/opensandbox/code-interpreter.sh"


async def main(image: str = IMAGE, entry_point: str = ENTRY_POINT) -> None:
    sandbox = await Sandbox.create(
        image,
        entrypoint=[entry_point],
        env={"PYTHON_VERSION": "3.11"},
        timeout=timedelta(minutes=10),
    )
    async with sandbox:
        execution = await sandbox.commands.run("echo 'Hello OpenSandbox!'")
        print(execution.logs.stdout[0].text)

        await sandbox.files.write_files([WriteEntry(path="/tmp/hello.txt", data="Hello World", mode=644)])
        print(await sandbox.files.read_file("/tmp/hello.txt"))

    # Leaving the block closed the connections; the sandbox itself ends here.
    await sandbox.kill()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
