# SPDX-License-Identifier: Apache-2.0
"""The state directory: identity, safety, one server at a time."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from opensandbox_server import statedir
from opensandbox_server.errors import CannotStart


def test_identity_and_key_are_made_once_and_kept(tmp_path: Path) -> None:
    first = statedir.open_state(tmp_path / "state")
    again = statedir.open_state(tmp_path / "state")
    assert first == again
    assert len(first.instance) == 32
    assert len(first.key) == 32
    assert stat.S_IMODE((first.path / "key").stat().st_mode) == 0o600
    assert statedir.open_state(tmp_path / "other").instance != first.instance


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(CannotStart, match=r"holds thesis\.tex"):
        statedir.open_state(tmp_path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["thesis.tex"]


def test_a_database_without_its_instance_is_refused(tmp_path: Path) -> None:
    (tmp_path / "opensandbox.db").touch()
    with pytest.raises(CannotStart, match="copied in part"):
        statedir.open_state(tmp_path)


def test_an_instance_file_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "instance").write_text("hello")
    with pytest.raises(CannotStart, match="does not hold an instance id"):
        statedir.open_state(tmp_path)


def test_a_directory_that_everyone_may_write_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    state.chmod(0o777)
    with pytest.raises(CannotStart, match="written by everyone"):
        statedir.open_state(state)
    state.chmod(0o755)
    tmp_path.chmod(0o777)
    with pytest.raises(CannotStart, match="written by everyone"):
        statedir.open_state(state)
    tmp_path.chmod(0o1777)
    statedir.open_state(state)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 65534, 65534)
    with pytest.raises(CannotStart, match="belongs to uid 65534"):
        statedir.open_state(state)


def test_a_readable_key_is_refused_with_the_command_that_helps(tmp_path: Path) -> None:
    state = statedir.open_state(tmp_path / "state")
    (state.path / "key").chmod(0o644)
    with pytest.raises(CannotStart) as caught:
        statedir.open_state(state.path)
    assert caught.value.hint.startswith("Run: chmod 600")


def test_only_one_server_holds_a_directory_and_the_second_names_it(tmp_path: Path) -> None:
    assert statedir.holder(tmp_path) is None
    with statedir.locked(tmp_path) as lock:
        lock.tell("http://127.0.0.1:8080")
        assert statedir.holder(tmp_path) == statedir.Holder(os.getpid(), "http://127.0.0.1:8080")
        with (
            pytest.raises(CannotStart, match=rf"pid {os.getpid()} at http://127\.0\.0\.1:8080"),
            statedir.locked(tmp_path),
        ):
            pass
    assert statedir.holder(tmp_path) is None
    with statedir.locked(tmp_path):
        pass


def test_a_lock_whose_process_died_is_free(tmp_path: Path) -> None:
    script = (
        "import os, signal, pathlib, sys\nfrom opensandbox_server import statedir\n"
        "with statedir.locked(pathlib.Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert ended.returncode == -9
    assert (tmp_path / "server.lock").read_text() != ""
    assert statedir.holder(tmp_path) is None
    with statedir.locked(tmp_path):
        pass


def test_only_its_owner_can_take_the_lock(tmp_path: Path) -> None:
    lock = tmp_path / "server.lock"
    lock.touch(0o644)  # as an earlier version made it
    with statedir.locked(tmp_path):
        assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.parametrize("pid", [os.getpid(), 4_194_305])
def test_what_a_killed_server_wrote_is_nobody(tmp_path: Path, pid: int) -> None:
    """Its pid may belong to a stranger by now, and the lock to a server that has not said who it is."""
    lock = tmp_path / "server.lock"
    lock.write_text(json.dumps({"pid": pid, "started": 1, "url": "http://127.0.0.1:8080"}))
    assert statedir.holder(tmp_path) is None
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(CannotStart, match="did not say who it is"):
            statedir.holder(tmp_path)
        with pytest.raises(CannotStart, match="another process") as caught, statedir.locked(tmp_path):
            pass
        assert str(pid) not in caught.value.message
    with statedir.locked(tmp_path):
        assert statedir.holder(tmp_path) == statedir.Holder(os.getpid())


def test_default_places() -> None:
    assert statedir.default_path({}, root=True) == Path("/var/lib/opensandbox")
    assert statedir.default_path({"XDG_DATA_HOME": "/d"}, root=False) == Path("/d/opensandbox")
    assert statedir.run_dir("abcdef0123" + "0" * 22, root=True) == Path("/run/opensandbox/abcdef01")
    assert statedir.run_dir("a" * 32, environ={"XDG_RUNTIME_DIR": "/r"}, root=False) == Path("/r/opensandbox/aaaaaaaa")


def test_a_run_directory_whose_sockets_would_not_fit_is_refused() -> None:
    fits = 107 - len("/00000000-0000-0000-0000-000000000000/ports")
    statedir.run_dir("a" * 32, Path("/" + "x" * (fits - 1)))
    with pytest.raises(CannotStart, match="too long"):
        statedir.run_dir("a" * 32, Path("/" + "x" * fits))
