# SPDX-License-Identifier: Apache-2.0
"""The published `osb`, imported once and then forked for each call: importing it takes longer than most calls.

Reads `{"arguments": [...], "stdin": "..."}` lines and answers each with `{"code", "stdout", "stderr"}`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
import traceback
from typing import Any

(ENTRY,) = importlib.metadata.entry_points(group="console_scripts", name="osb")
MAIN = ENTRY.load()


def child(arguments: list[str], files: list[Any]) -> None:
    """Never returns: the call ends as the program would."""
    code = 70
    try:
        for number, file in enumerate(files):
            os.dup2(file.fileno(), number)
        sys.argv = ["osb", *arguments]
        MAIN()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write((asked.get("stdin") or "").encode())
            given.seek(0)
            if (pid := os.fork()) == 0:
                child(asked["arguments"], [given, out, err])
            _, status = os.waitpid(pid, 0)
            told = {"code": os.waitstatus_to_exitcode(status)}
            for name, file in (("stdout", out), ("stderr", err)):
                file.seek(0)
                told[name] = file.read().decode(errors="replace")
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
