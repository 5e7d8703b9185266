# SPDX-License-Identifier: Apache-2.0
"""Trees as tar archives, made and unpacked on this machine piece by piece. Blocking, and the same for both worlds."""

from __future__ import annotations

import io
import logging
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from opensandbox.exceptions import SandboxException

logger = logging.getLogger("opensandbox")

_CHUNK = 1 << 18
_LONGEST_HEADER = 1 << 20
# Of the links that are left out, so many are told by name.
_MOST_NAMES = 10


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


def unpack(
    pull: Callable[[], bytes], directory: str | os.PathLike[str], *, gzip: bool = False, most: int | None = None
) -> list[str]:
    """Extract an archive that arrives chunk by chunk; the first names of links that were left out.

    It was made inside a sandbox, so nothing in it is trusted: no way out of the directory, nothing through a link, no
    devices, no owners, and not more than `most` bytes. A link that would lead out is left out.
    """
    target = _Target(Path(directory), most)
    try:
        # Buffered, for tarfile takes a short read for the end. No guess at its compression: that may take much memory.
        with tarfile.open(
            fileobj=io.BufferedReader(Pulled(pull), _CHUNK), mode="r|gz" if gzip else "r|", tarinfo=_Entry
        ) as archive:
            while (member := archive.next()) is not None:
                target.take(archive, member)
                # It would keep them all.
                archive.members = []  # type: ignore[attr-defined]
    except (tarfile.TarError, ValueError) as error:
        raise SandboxException(f"the archive cannot be extracted: {error}") from error
    # What comes behind the end of the archive; a broken connection shows only there.
    while pull():
        pass
    if target.left_out:
        logger.warning("left out %d links that lead to nothing in %s: %s", target.left_out, directory, target.names)
    return target.names


def too_much(most: int) -> SandboxException:
    """The exception for a tree that is larger than was asked for."""
    return SandboxException(
        f"there is more than {most} bytes of it", hint="Raise max_bytes, or give None for no limit, if that is right."
    )


class _Entry(tarfile.TarInfo):
    """An entry whose long names and extended headers, which are held in memory, have a limit."""

    def _proc_member(self, archive: tarfile.TarFile) -> Any:
        special = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
        if self.type in (*special, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK) and self.size > _LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(archive)  # type: ignore[misc]


class _Target:
    """A directory that entries are written into.

    Every directory on the way to an entry is looked at, and none of them may be a link: then it does not matter where
    the links lead that were made before.
    """

    def __init__(self, top: Path, most: int | None) -> None:
        self._top = top
        self._most = most
        self._written = 0
        self.left_out = 0
        self.names: list[str] = []
        top.mkdir(parents=True, exist_ok=True)

    def take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Write an entry."""
        # Empty files fill a disk, too. Holes count: whoever copies the tree may fill them.
        self._written += tarfile.BLOCKSIZE + (member.size if member.isreg() else 0)
        if self._most is not None and self._written > self._most:
            raise too_much(self._most)
        parts = _parts(member.name)
        if member.isdir():
            self._directory(parts)
            self._times(member, parts)
        elif not parts:
            raise tarfile.ExtractError(f"{member.name!r} is the directory itself")
        elif member.isreg():
            self._file(archive, member, self._place(parts))
            self._times(member, parts)
        elif member.issym():
            if _stays_inside(member.linkname, len(parts) - 1):
                self._place(parts).symlink_to(member.linkname)
            else:
                self._leave_out(member)
        elif member.islnk():
            self._hard_link(member, parts, _parts(member.linkname))
        else:
            raise tarfile.ExtractError(f"{member.name!r} is a device or FIFO")

    def _directory(self, parts: list[str]) -> None:
        if not parts:
            return
        path = self._top.joinpath(*parts)
        self._parent(parts)
        if not stat.S_ISDIR(_mode(path) or 0):
            path.unlink(missing_ok=True)
            path.mkdir()

    def _parent(self, parts: list[str]) -> None:
        path = self._top
        for part in parts[:-1]:
            path = path / part
            mode = _mode(path)
            if mode is None:
                path.mkdir()
            elif not stat.S_ISDIR(mode):
                raise tarfile.ExtractError(f"{str(path)!r} is there, and is not a directory")

    def _place(self, parts: list[str]) -> Path:
        """Where to make something that is not a directory; what was there before is gone."""
        self._parent(parts)
        path = self._top.joinpath(*parts)
        mode = _mode(path)
        if mode is not None and stat.S_ISDIR(mode):
            raise tarfile.ExtractError(f"{str(path)!r} is there, and is a directory")
        path.unlink(missing_ok=True)
        return path

    def _file(self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        content = archive.extractfile(member)
        mode = member.mode & 0o755 | 0o600
        with path.open("xb") as file:
            left = member.size
            while content is not None and left:
                chunk = content.read(min(_CHUNK, left))
                if not chunk:
                    raise tarfile.ReadError(f"{member.name!r} is cut off")
                left -= len(chunk)
                # A run of zeros becomes a hole.
                if chunk.count(0) == len(chunk):
                    file.seek(len(chunk), os.SEEK_CUR)
                else:
                    file.write(chunk)
            file.truncate(member.size)
        path.chmod(mode if mode & 0o100 else mode & ~0o111)

    def _times(self, member: tarfile.TarInfo, parts: list[str]) -> None:
        # It may be one that this machine cannot write down.
        with suppress(OverflowError, ValueError, OSError):
            os.utime(self._top.joinpath(*parts), (member.mtime, member.mtime))

    def _hard_link(self, member: tarfile.TarInfo, parts: list[str], source: list[str]) -> None:
        self._parent(source)
        existing = self._top.joinpath(*source)
        # A symbolic link would mean something else in another place; one that was left out is not there at all.
        if parts != source and stat.S_ISREG(_mode(existing) or 0):
            os.link(existing, self._place(parts))
        else:
            self._leave_out(member)

    def _leave_out(self, link: tarfile.TarInfo) -> None:
        self.left_out += 1
        if len(self.names) < _MOST_NAMES:
            self.names.append(link.name)


def _mode(path: Path) -> int | None:
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return None


def _parts(name: str) -> list[str]:
    """The steps of a name below the directory; an absolute one is taken as one below."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    # On Windows there are other ways to write a way out.
    if ".." in parts or (os.sep != "/" and any(os.sep in part or ":" in part for part in parts)):
        raise tarfile.ExtractError(f"{name!r} leads out of the directory")
    return parts


def _stays_inside(link: str, depth: int) -> bool:
    """Whether a symbolic link, so deep below the directory, leads nowhere else, whatever other such links there are.

    Steps up come first, from where the link really is. Behind a name, which may be another link, they would lead from
    where that one leads to.
    """
    parts = [part for part in link.split("/") if part not in ("", ".")]
    up = 0
    while up < len(parts) and parts[up] == "..":
        up += 1
    unclear = ".." in parts[up:] or (os.sep != "/" and any(os.sep in part or ":" in part for part in parts))
    return bool(link) and not link.startswith("/") and up <= depth and not unclear
