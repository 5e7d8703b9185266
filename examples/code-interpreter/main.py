# SPDX-License-Identifier: Apache-2.0
"""Code cells: a sandbox, a command, a file, and Python that keeps its state.

    opensandbox-server &
    python examples/code-interpreter/main.py [IMAGE [ENTRY POINT]]

It runs as it stands with this repository's packages and with the published ones, offline.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from code_interpreter import CodeInterpreter, SupportedLanguage
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

        interpreter = await CodeInterpreter.create(sandbox)
        result = await interpreter.codes.run(
            "import sys\nprint(sys.version)\nresult = 2 + 2\nresult", language=SupportedLanguage.PYTHON
        )
        print(result.result[0].text)

        # What one cell defines, the next one finds; what one gets wrong does not end it.
        failed = await interpreter.codes.run("result / 0")
        print(failed.error.name if failed.error else "")
        again = await interpreter.codes.run("result * 10")
        print(again.result[0].text)

    # Leaving the block closed the connections; the sandbox itself ends here.
    await sandbox.kill()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
