# SPDX-License-Identifier: Apache-2.0
"""Trees as tar archives, made and unpacked on this machine piece by piece. Blocking, and the same for both worlds."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

from opensandbox.exceptions import SandboxException

_CHUNK = 1 << 18


class Pulled(io.RawIOBase):
    """A file to read what comes chunk by chunk; `pull` gives the next one, an empty one at the end."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        self._pull = pull
        self._rest = b""

    def readable(self) -> bool:
        """It is for nothing else."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Fill what is given, as far as the current chunk goes."""
        if not self._rest:
            self._rest = self._pull()
        size = min(len(buffer), len(self._rest))
        buffer[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def packed(directory: str | os.PathLike[str]) -> io.RawIOBase:
    """A local directory as an archive to read.

    Modes, times, symbolic and hard links and empty directories are kept. Sockets, FIFOs and devices are left out.
    """
    top = Path(directory)
    if not top.is_dir():
        raise NotADirectoryError(f"{top} is not a directory")
    pieces = _pieces(top)
    return Pulled(lambda: next(pieces, b""))


def _pieces(top: Path) -> Iterator[bytes]:
    # Only for what it knows about inodes: what it would write goes nowhere.
    archive = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)
    for path in _walked(top):
        name = "." if path == top else path.relative_to(top).as_posix()
        info = archive.gettarinfo(path, name)
        if info is None or not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
            continue
        # To the nanosecond, and without the names that this machine has for its users.
        seconds, rest = divmod(path.lstat().st_mtime_ns, 10**9)
        info.pax_headers, info.uname, info.gname = {"mtime": f"{seconds}.{rest:09}"}, "", ""
        yield info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        if info.isreg():
            yield from _content(path, info.size)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _walked(top: Path) -> Iterator[Path]:
    yield top
    for folder, directories, files in os.walk(top, onerror=_refuse):
        directories.sort()
        for name in sorted([*directories, *files]):
            yield Path(folder, name)


def _refuse(error: OSError) -> None:
    raise error


def _content(path: Path, size: int) -> Iterator[bytes]:
    left = size
    with path.open("rb") as file:
        while left:
            chunk = file.read(min(_CHUNK, left))
            if not chunk:
                raise SandboxException(f"{path} became shorter while it was sent")
            left -= len(chunk)
            yield chunk
    padding = -size % tarfile.BLOCKSIZE
    if padding:
        yield bytes(padding)


def unpack(pull: Callable[[], bytes], directory: str | os.PathLike[str]) -> int:
    """Extract an archive that arrives chunk by chunk; how many entries it had.

    It was made inside a sandbox, so nothing in it is trusted: no absolute names, no way out of the directory, no
    devices, no owners.
    """
    if not hasattr(tarfile, "data_filter"):
        raise SandboxException("this Python extracts archives without a filter", hint="Use Python 3.11.4 or newer.")
    Path(directory).mkdir(parents=True, exist_ok=True)
    count = 0
    # Buffered, for tarfile takes a short read for the end.
    with tarfile.open(fileobj=io.BufferedReader(Pulled(pull), _CHUNK), mode="r|*") as archive:
        try:
            for member in archive:
                archive.extract(member, directory, filter="data")
                count += 1
        except tarfile.TarError as error:
            raise SandboxException(f"the archive cannot be extracted: {error}") from error
    # What comes behind the end of the archive; a broken connection shows only there.
    while pull():
        pass
    return count
