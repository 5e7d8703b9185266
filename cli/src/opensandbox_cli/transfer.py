# SPDX-License-Identifier: Apache-2.0
"""Files on their way between here and a sandbox. Only a piece is in memory at a time."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

from opensandbox_cli.failure import Failure

if TYPE_CHECKING:
    from opensandbox import Sandbox
    from opensandbox_cli.screen import Screen

# Below this a progress bar would only flicker.
WORTH_A_BAR = 4 << 20


class Counted(io.RawIOBase):
    """A file that tells how much of it has been read."""

    def __init__(self, file: IO[bytes], tell: Callable[[int], None]) -> None:
        self._file = file
        self._tell = tell

    def readable(self) -> bool:
        """It is for reading."""
        return True

    def seekable(self) -> bool:
        """As the file."""
        return self._file.seekable()

    def tell(self) -> int:
        """As the file."""
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As the file."""
        return self._file.seek(offset, whence)

    def read(self, size: int = -1) -> bytes:
        """As the file, and count."""
        data = self._file.read(size)
        self._tell(len(data))
        return data


@contextlib.contextmanager
def progress(screen: Screen, what: str, size: int | None) -> Iterator[Callable[[int], None]]:
    """Something to call with the number of bytes moved; shows a bar on a terminal, when there is enough to move."""
    if not sys.stderr.isatty() or (size is not None and size < WORTH_A_BAR):
        yield lambda count: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    from opensandbox_cli.screen import visible

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=screen.console(sys.stderr), transient=True) as bar:
        task = bar.add_task(visible(what), total=size)
        yield lambda count: bar.advance(task, count)


@contextlib.contextmanager
def source(local: str) -> Iterator[tuple[IO[bytes], int | None, int | None]]:
    """A local file to read: the file, its size and its mode, as far as it has them. `-` is standard input."""
    if local == "-":
        yield sys.stdin.buffer, None, None
        return
    if Path(local).is_dir():
        raise _directory(local)
    with open(local, "rb") as file:
        facts = os.fstat(file.fileno())
        regular = stat.S_ISREG(facts.st_mode)
        yield file, facts.st_size if regular else None, int(f"{facts.st_mode & 0o777:o}") if regular else None


@contextlib.contextmanager
def destination(local: str, name: str) -> Iterator[tuple[IO[bytes], str]]:
    """A local file to write, and where it will be. A file is replaced only when all of it has come.

    `-` is standard output, a directory takes a file of that name, and what is no regular file is written to directly.
    """
    if local == "-":
        yield sys.stdout.buffer, local
        return
    path = Path(local)
    if path.is_dir():
        path = path / name
    if path.exists() and not path.is_file():
        if path.is_dir():
            raise Failure(f"{path} is a directory")
        with path.open("wb", buffering=0) as device:
            yield device, str(path)
        return
    path = path.resolve()
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else 0o666 & ~_umask()
    handle, fresh = tempfile.mkstemp(prefix=f".{path.name[:200]}.", dir=path.parent)
    try:
        with open(handle, "wb") as file:
            yield file, str(path)
        os.chmod(fresh, mode)
        os.replace(fresh, path)
    except BaseException:
        os.unlink(fresh)
        raise


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _directory(path: str) -> Failure:
    return Failure(
        f"{path} is a directory",
        "Pack it: `tar c DIR | osb file upload ID - /tmp/dir.tar`, then `osb command run ID -- tar xf /tmp/dir.tar`.",
    )


async def upload(
    sandbox: Sandbox, screen: Screen, local: str, remote: str, mode: int | None = None, *, executable: bool = False
) -> None:
    """Send a local file. Without a mode it keeps its own."""
    with source(local) as (file, size, own_mode), progress(screen, f"↑ {remote}", size) as moved:
        chosen = mode if mode is not None else own_mode if own_mode is not None else 644
        await sandbox.files.write_file(remote, Counted(file, moved), mode=755 if executable else chosen)


async def upload_into(sandbox: Sandbox, screen: Screen, local: str, remote: str, mode: int | None = None) -> str:
    """As `upload`; where the path is a directory of the sandbox, the file goes into it. Where it is now."""
    from opensandbox.exceptions import InvalidRequestException

    try:
        await upload(sandbox, screen, local, remote, mode)
    except InvalidRequestException:
        # Asked only now: nearly always the path is a file's.
        if (await sandbox.files.get_file_info([remote]))[remote].entry_type != "directory":
            raise
        if local == "-":
            raise Failure(f"{remote} is a directory", "Name the file that standard input goes to.") from None
        remote = f"{remote.rstrip('/')}/{Path(local).name}"
        await upload(sandbox, screen, local, remote, mode)
    return remote


async def download(sandbox: Sandbox, screen: Screen, remote: str, local: str) -> str:
    """Fetch a file; where it is now."""
    info = (await sandbox.files.get_file_info([remote])).get(remote)
    if info is not None and info.entry_type == "directory":
        raise Failure(
            f"{remote} is a directory",
            f"Pack it: `osb command run ID -- tar cf /tmp/dir.tar -C {remote} .`, then download that.",
        )
    # A link says nothing about the size of what it leads to.
    size = info.size if info is not None and info.entry_type == "file" else None
    name = remote.rstrip("/").rpartition("/")[2] or "file"
    async with await sandbox.files.read_bytes_stream(remote, chunk_size=1 << 18) as stream:
        with destination(local, name) as (file, place), progress(screen, f"↓ {remote}", size) as moved:
            async for chunk in stream:
                file.write(chunk)
                moved(len(chunk))
            file.flush()
    return place
