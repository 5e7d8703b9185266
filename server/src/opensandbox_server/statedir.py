# SPDX-License-Identifier: Apache-2.0
"""The state directory: who this instance is, and that only one server is it at a time.

instance         32 hex digits; sockets, cgroups and uid blocks are named after it
key              32 random bytes in hex, 0600; sandbox tokens are derived from it
opensandbox.db   the store
server.lock      flocked by the running server; tells its pid and address
log/             what sandboxd and ingress say
records/ spool/ fs/ ingress.json   sandboxd's own
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import CannotStart

_INSTANCE = re.compile(r"[0-9a-f]{32}")
_SOCKET_PATH_MAX = 107
_SOCKET_LONGEST = "/00000000-0000-0000-0000-000000000000/ports"


@dataclass(frozen=True)
class StateDir:
    """An opened state directory.

    >>> state = open_state(default_path())      # doctest: +SKIP
    >>> state.run_dir()                         # doctest: +SKIP
    PosixPath('/run/opensandbox/1f2e3d4c')
    """

    path: Path
    instance: str
    key: bytes

    @property
    def database(self) -> Path:
        """The default place of the store."""
        return self.path / "opensandbox.db"

    @property
    def log(self) -> Path:
        """The directory of log files."""
        return self.path / "log"


def default_path(environ: Mapping[str, str] = os.environ, *, root: bool | None = None) -> Path:
    """`/var/lib/opensandbox` for root, the XDG data directory for others."""
    if os.geteuid() == 0 if root is None else root:
        return Path("/var/lib/opensandbox")
    data = environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local" / "share") / "opensandbox"


def run_dir(
    instance: str, configured: Path | None = None, environ: Mapping[str, str] = os.environ, *, root: bool | None = None
) -> Path:
    """The directory of the sockets. Its path is short because a socket's path has 107 bytes in all."""
    if configured is not None:
        path = configured.absolute()
    elif os.geteuid() == 0 if root is None else root:
        path = Path("/run/opensandbox") / instance[:8]
    else:
        runtime = environ.get("XDG_RUNTIME_DIR")
        path = (Path(runtime) / "opensandbox" if runtime else Path(f"/tmp/opensandbox-{os.geteuid()}")) / instance[:8]  # noqa: S108
    longest = len(os.fsencode(path)) + len(_SOCKET_LONGEST)
    if longest > _SOCKET_PATH_MAX:
        raise CannotStart(
            f"The run directory {path} is too long: its sockets would need {longest} bytes of {_SOCKET_PATH_MAX}.",
            "Set [local] run_dir to a shorter path.",
        )
    return path


def open_state(path: Path) -> StateDir:
    """Make the directory if it is missing, check that it is ours and safe, and read who we are."""
    path = path.expanduser().absolute()
    try:
        path.mkdir(mode=0o755, parents=True, exist_ok=True)
        _check_safe(path)
        _check_ours(path)
        (path / "log").mkdir(mode=0o750, exist_ok=True)
        instance = _kept(path / "instance", lambda: secrets.token_hex(16), 0o644)
        key = _kept(path / "key", lambda: secrets.token_hex(32), 0o600)
    except PermissionError as error:
        raise CannotStart(
            f"The state directory {path} cannot be used: {error.strerror} ({error.filename}).",
            "Choose one of your own with --state-dir, or run as the user it belongs to.",
        ) from None
    except OSError as error:
        raise CannotStart(
            f"The state directory {path} cannot be used: {error.strerror} ({error.filename}).",
            "Choose another one with --state-dir.",
        ) from None
    if not _INSTANCE.fullmatch(instance):
        raise CannotStart(
            f"{path / 'instance'} does not hold an instance id.",
            "Restore the file from a backup, or choose an empty directory with --state-dir.",
        )
    mode = stat.S_IMODE((path / "key").stat().st_mode)
    if mode & 0o077:
        raise CannotStart(f"{path / 'key'} can be read by others (mode {mode:o}).", f"Run: chmod 600 {path / 'key'}")
    try:
        return StateDir(path, instance, bytes.fromhex(key))
    except ValueError:
        raise CannotStart(
            f"{path / 'key'} does not hold a key.",
            "Remove it and start again: a new one is made, and running sandboxes must be deleted.",
        ) from None


def _check_safe(path: Path) -> None:
    """Whoever can write here, or rename a directory above, can become root through what sandboxd runs."""
    for place in (path, *path.resolve().parents):
        info = place.stat()
        mode = stat.S_IMODE(info.st_mode)
        if info.st_uid not in (0, os.geteuid()):
            raise CannotStart(
                f"{place} belongs to uid {info.st_uid}, who could replace the state of this server.",
                f"Run: chown {os.geteuid()} {place} (or choose another directory with --state-dir)",
            )
        if mode & stat.S_IWOTH and (place == path or not mode & stat.S_ISVTX):
            raise CannotStart(
                f"{place} can be written by everyone (mode {mode:o}).",
                f"Run: chmod o-w {place} (or choose another directory with --state-dir)",
            )
    if path.stat().st_uid != os.geteuid():
        raise CannotStart(
            f"The state directory {path} belongs to uid {path.stat().st_uid}, the server runs as uid {os.geteuid()}.",
            "Run it as that user, or choose another directory with --state-dir.",
        )


def _check_ours(path: Path) -> None:
    """A directory that holds other things is somebody else's, whatever the reason it was named."""
    if (path / "instance").exists():
        return
    if (path / "opensandbox.db").exists():
        raise CannotStart(
            f"{path} holds a database but no instance id: the directory was copied in part.",
            "Restore the file `instance`, or choose an empty directory with --state-dir.",
        )
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ("log", "server.lock", "lost+found"))
    if foreign:
        shown = ", ".join(foreign[:3]) + (", …" if len(foreign) > 3 else "")
        raise CannotStart(
            f"{path} is not a state directory of this server: it holds {shown}.",
            "Choose an empty directory with --state-dir.",
        )


def _kept(file: Path, make: Any, mode: int) -> str:
    """The file's content; made once, whole or not at all."""
    with contextlib.suppress(FileNotFoundError):
        return file.read_text(encoding="ascii", errors="replace").strip()
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(fd, "w", encoding="ascii") as out:
            out.write(make() + "\n")
            out.flush()
            os.fsync(out.fileno())
        # link, not rename: two servers that start at once must agree on the first one's id.
        with contextlib.suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
    return file.read_text(encoding="ascii", errors="replace").strip()


@dataclass(frozen=True)
class Holder:
    """The server that holds a state directory."""

    pid: int
    url: str = ""


class ServerLock:
    """The flock that makes a server the only one of its state directory, and says which process it is."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def tell(self, url: str) -> None:
        """Write down who holds it, for `down` and for the message of a second server."""
        pid = os.getpid()
        text = json.dumps({"pid": pid, "started": _started(pid), "url": url}).encode() + b"\n"
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text, 0)


@contextlib.contextmanager
def locked(state: Path) -> Iterator[ServerLock]:
    """Hold the directory for as long as this process serves; refuse when another one does."""
    fd = _lock_file(state, os.O_CREAT)
    try:
        if not _take(fd):
            holder = _told(fd)
            named = f"pid {holder.pid}{f' at {holder.url}' if holder.url else ''}" if holder else "another process"
            raise CannotStart(
                f"A server already runs on the state directory {state}: {named}.",
                "Use that one, stop it with `opensandbox-server down`, or give this one another --state-dir.",
            )
        os.fchmod(fd, 0o600)  # whoever can open it can lock it; an earlier version let everyone read
        lock = ServerLock(fd)
        lock.tell("")
        yield lock
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)


def _take(fd: int) -> bool:
    """Lock it. `holder` locks it too, for a moment, so one refusal proves nothing."""
    for _ in range(5):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.02)
        else:
            return True
    return False


def holder(state: Path) -> Holder | None:
    """Which server runs on this directory; None when none does.

    What a killed server wrote stays in the file, so only what a living holder wrote counts.
    """
    lock = state / "server.lock"
    try:
        if not is_held(lock):
            return None
        fd = _lock_file(state, 0)
    except PermissionError as error:
        raise CannotStart(f"{lock} cannot be read: {error.strerror}.", "Run as the user the server runs as.") from None
    try:
        found = _told(fd)
    finally:
        os.close(fd)
    if found is None and is_held(lock):
        raise CannotStart(f"{lock} is held by a process that did not say who it is.", f"Find it with: fuser -v {lock}")
    return found


def is_held(lock: Path) -> bool:
    """Whether a process holds this lock file."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _lock_file(state: Path, flags: int) -> int:
    return os.open(state / "server.lock", os.O_RDWR | os.O_NOFOLLOW | flags, 0o600)


def _told(fd: int) -> Holder | None:
    """Who holds a lock that is held. A server that has just taken it needs a moment to write itself down."""
    for _ in range(5):
        if found := _read_holder(fd):
            return found
        time.sleep(0.02)
    return None


def _read_holder(fd: int) -> Holder | None:
    """Who wrote itself down, if that process lives: its pid may be somebody else's by now."""
    try:
        value = json.loads(os.pread(fd, 4096, 0))
        found = Holder(int(value["pid"]), str(value.get("url", "")))
        return found if value["started"] == _started(found.pid) else None
    except (ValueError, KeyError, TypeError, OSError):
        return None


def _started(pid: int) -> int:
    """When the kernel started it, in ticks since boot: with the pid, this is one process for good."""
    # The name in parentheses may hold anything, spaces and parentheses too.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
