# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the life of one sandbox, from nothing to gone, on this machine.

Starts a server of its own with a temporary state directory and free ports, uses the SDK as any program would, and
takes everything away again, also after Ctrl-C. Settings of the environment and of the home directory are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig
from opensandbox.models import WriteEntry
from opensandbox.models.sandboxes import SandboxIsolation

SERVER = Path(sys.executable).parent / "opensandbox-server"
COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ
START_SECONDS = 60.0


def _paint(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if COLOUR else text


def bold(text: str) -> str:
    return _paint(text, "1")


def dim(text: str) -> str:
    return _paint(text, "2")


@contextlib.contextmanager
def stage(title: str) -> Iterator[Callable[[str], None]]:
    """One line: what is done, how long it took, what came of it."""
    print(f"  {title:<28}", end="", flush=True)
    said: list[str] = []
    start = time.perf_counter()
    try:
        yield said.append
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("stopped")
        raise
    except BaseException:
        print(_paint("failed", "31"))
        raise
    milliseconds = (time.perf_counter() - start) * 1000
    print(f"{milliseconds:8.1f} ms   {' '.join(said)}".rstrip())


def show_parts(whole: float, timings: dict[str, float]) -> None:
    """Where the time of a create went: a line for the server, for its longest stage, and for this side of it."""

    def line(title: str, taken: float, parts: dict[str, float]) -> None:
        listed = ", ".join(f"{name} {part:.1f} ms" for name, part in parts.items())
        print(dim(f"  {title:<28}{taken:8.1f} ms   {listed}".rstrip()))

    if "total" not in timings:
        return
    # A name with a dot is a part of the stage before the dot; its total is that stage as sandboxd sees it.
    stages = {name: taken for name, taken in timings.items() if name != "total" and "." not in name}
    launch = {
        name.removeprefix("launch."): taken
        for name, taken in timings.items()
        if name.startswith("launch.") and name != "launch.total"
    }
    line("  at the server", timings["total"], stages)
    if launch:
        line("    launch", timings["launch"], launch)
    line("  client set-up, connection", whole - timings["total"], {})


def clean_environment() -> dict[str, str]:
    """This environment without anything that would lead server or SDK elsewhere."""
    ours = ("OPEN_SANDBOX_", "OPENSANDBOX_", "SANDBOX_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


class Server:
    """A server of our own, and all it leaves behind, below one temporary folder."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="opensandbox-demo-"))
        self.state = self.folder / "state"
        # An empty file, so that one in the home directory is not read.
        self.configuration = self.folder / "demo.toml"
        self.configuration.touch()
        self.process: subprocess.Popen[str] | None = None
        self.log: list[str] = []

    def start(self) -> str:
        """Start it and wait for the address it prints."""
        self.process = subprocess.Popen(
            [SERVER, "--config", self.configuration, "--state-dir", self.state, "--port", "0"],
            env=clean_environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # Ctrl-C is for this program alone; it then stops the server in good order.
            start_new_session=True,
        )
        # The SDK fetches its HTTP client with the first request; here it uses the time the server takes.
        importlib.import_module("httpx2")
        address: list[str] = []
        known = threading.Event()

        def read() -> None:
            assert self.process is not None
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.log.append(line.rstrip())
                found = [word for word in line.split() if word.startswith("http://")]
                if found and not address:
                    address.append(found[0].rstrip("/.,"))
                    known.set()
            known.set()

        threading.Thread(target=read, daemon=True).start()
        if not known.wait(START_SECONDS) or not address:
            raise SystemExit("\n\nThe server did not start:\n\n  " + "\n  ".join(self.log[-20:]))
        return address[0]

    def stop(self) -> None:
        """End server, sandboxd and every sandbox, then remove the folder."""
        if self.process is not None:
            # The server first, by itself: it may not have got as far as a state directory that `down` could find.
            self.process.terminate()
            self.process.wait(timeout=30)
            subprocess.run(
                [SERVER, "down", "--all", "--config", self.configuration, "--state-dir", self.state],
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                check=True,
                timeout=60,
            )

        def unlock(function: Callable[[str], object], path: str, _: object) -> None:
            # A rootless overlay leaves folders without any permission bit.
            os.chmod(Path(path).parent, stat.S_IRWXU)
            os.chmod(path, stat.S_IRWXU)
            function(path)

        shutil.rmtree(self.folder, onerror=unlock)


def isolation_table(isolation: SandboxIsolation) -> Iterator[tuple[str, str]]:
    """What the sandbox says about itself, one row for each means."""
    yield "namespaces", " ".join(isolation.namespaces or [])
    yield "users", isolation.users or ""
    yield "root file system", isolation.root or ""
    yield "system calls", isolation.seccomp or ""
    yield "capabilities", " ".join(isolation.capabilities or []) or "none"
    yield "no new privileges", "yes" if isolation.no_new_privileges else "no"
    for name, limit in (isolation.limits or {}).items():
        yield (
            f"limit: {name}",
            f"{limit.value or 'none'}  {dim(f'by {limit.means}')}" if limit.means != "none" else "none",
        )
    if isolation.network is not None:
        yield "network", " ".join(filter(None, [isolation.network.value, isolation.network.means]))
    for missing in isolation.missing or []:
        yield "missing on this host", missing


async def show(address: str) -> None:
    """The demonstration proper."""
    connection = ConnectionConfig(domain=address, api_key="", request_timeout=timedelta(seconds=30))
    with stage("create a sandbox") as say:
        start = time.perf_counter()
        sandbox = await Sandbox.create(
            "host",
            timeout=timedelta(minutes=5),
            resource={"cpu": "1", "memory": "256Mi"},
            connection_config=connection,
        )
        taken = (time.perf_counter() - start) * 1000
        say(f"id {sandbox.id}")
    show_parts(taken, sandbox.timings)
    async with sandbox:
        with stage("run a command") as say:
            execution = await sandbox.commands.run("echo Hello from $(hostname), where I am $(whoami)")
            say(execution.text.strip())
        with stage("the same, now warm") as say:
            execution = await sandbox.commands.run("python3 -c 'print(6 * 7)'")
            say(f"6 × 7 = {execution.text.strip()}")
        with stage("write a file") as say:
            poem = "a file,\nthere and back\n" * 1000
            await sandbox.files.write_files([WriteEntry(path="/workspace/poem.txt", data=poem)])
            say(f"{len(poem):,} bytes to /workspace/poem.txt")
        with stage("read it back") as say:
            back = await sandbox.files.read_file("/workspace/poem.txt")
            if back != poem:
                raise RuntimeError("the file came back different")
            say("the same bytes")
        with stage("look around inside") as say:
            looked = await sandbox.commands.run(
                "echo $(ls /proc | grep -c '^[0-9]') processes, "
                "network devices: $(ls /sys/class/net), home directories: $(ls /home)"
            )
            say(looked.text.strip())
        info = await sandbox.get_info()
        with stage("end it"):
            await sandbox.kill()

    if info.isolation is not None:
        print(f"\n{bold('What isolated it')}")
        for name, means in isolation_table(info.isolation):
            print(f"  {name:<28}{means}")


def main() -> int:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    for name in set(os.environ) - set(clean_environment()):
        del os.environ[name]
    print(f"\n{bold('One sandbox, from nothing to gone')}")
    server = Server()
    result = 0
    try:
        with stage("start the server") as say:
            address = server.start()
            say(address)
        asyncio.run(show(address))
    except KeyboardInterrupt:
        result = 130
    finally:
        # A second Ctrl-C must not leave half of it behind.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        server.stop()
    if result:
        print("\nStopped, and nothing is left of it.\n")
    else:
        print(
            f"\nNothing is left of it. Next: {bold('make serve')} starts a server;"
            " README.md has a program to try on it.\n"
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
