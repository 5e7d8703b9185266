# SPDX-License-Identifier: Apache-2.0
"""`osb file`: every byte, both ways, and names that would like to be more than names."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from conftest import Osb

Start = Callable[..., subprocess.Popen[bytes]]
EVERY_BYTE = bytes(range(256)) * 5000


def test_files_come_back_as_they_went(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    local, back = tmp_path / "up.bin", tmp_path / "down.bin"
    local.write_bytes(EVERY_BYTE)
    local.chmod(0o750)
    osb("file", "upload", sandbox_id, str(local), "/tmp/f/up.bin")
    osb("file", "download", sandbox_id, "/tmp/f/up.bin", str(back))
    assert back.read_bytes() == EVERY_BYTE
    assert json.loads(osb("file", "info", sandbox_id, "/tmp/f/up.bin", "-o", "json").stdout)[0]["mode"] == 750
    assert osb("file", "cat", sandbox_id, "/tmp/f/up.bin").stdout == EVERY_BYTE
    osb("file", "download", sandbox_id, "/tmp/f/up.bin", str(tmp_path / "sub"), code=0)
    (tmp_path / "folder").mkdir()
    osb("file", "download", sandbox_id, "/tmp/f/up.bin", str(tmp_path / "folder"))
    assert (tmp_path / "folder" / "up.bin").read_bytes() == EVERY_BYTE


def test_standard_input_and_output(osb: Osb, sandbox_id: str) -> None:
    osb("file", "upload", sandbox_id, "-", "/tmp/piped", stdin=EVERY_BYTE)
    assert osb("file", "download", sandbox_id, "/tmp/piped", "-").stdout == EVERY_BYTE
    osb("file", "write", sandbox_id, "/tmp/written", stdin=b"\xff\0")
    assert osb("file", "cat", sandbox_id, "/tmp/written").stdout == b"\xff\0"
    osb("file", "write", sandbox_id, "/tmp/latin", "-c", "ä", "--encoding", "latin-1", "--mode", "0600")
    assert osb("file", "cat", sandbox_id, "/tmp/latin").stdout == b"\xe4"
    assert osb("file", "cat", sandbox_id, "/tmp/latin", "--encoding", "latin-1").stdout == "ä".encode()


def test_a_failed_download_leaves_what_was_there(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("old")
    said = osb("file", "download", sandbox_id, "/nosuch", str(target), code=1).stderr.decode()
    assert "FILE_NOT_FOUND" in said
    assert target.read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["home", "precious"]


def test_a_new_file_has_the_rights_of_a_new_file(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    osb("file", "write", sandbox_id, "/tmp/w", "-c", "x")
    osb("file", "download", sandbox_id, "/tmp/w", str(tmp_path / "w"))
    (tmp_path / "reference").touch()
    assert (tmp_path / "w").stat().st_mode == (tmp_path / "reference").stat().st_mode


def test_directories_are_refused_with_a_way_out(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    assert b"tar" in osb("file", "upload", sandbox_id, str(tmp_path), "/tmp/x", code=1).stderr
    assert b"tar" in osb("file", "download", sandbox_id, "/tmp", str(tmp_path / "x"), code=1).stderr


def test_the_small_ones(osb: Osb, sandbox_id: str) -> None:
    def answer(*arguments: str) -> object:
        return json.loads(osb("file", *arguments, "-o", "json").stdout)

    assert answer("mkdir", sandbox_id, "/tmp/s/a", "/tmp/s/b") == [
        {"path": "/tmp/s/a", "status": "created"},
        {"path": "/tmp/s/b", "status": "created"},
    ]
    assert answer("write", sandbox_id, "/tmp/s/one", "-c", "x y x") == {
        "status": "ok",
        "message": "Written: /tmp/s/one",
    }
    osb("file", "mv", sandbox_id, "/tmp/s/one", "/tmp/s/two")
    replaced = answer("replace", sandbox_id, "/tmp/s/two", "--old", "x", "--new", "z")
    assert replaced == {"status": "ok", "message": "Replaced in: /tmp/s/two", "replaced_count": 2}
    osb("file", "chmod", sandbox_id, "/tmp/s/two", "--mode", "0600")
    found = answer("search", sandbox_id, "/tmp/s", "-p", "t*")
    assert isinstance(found, list)
    assert [(entry["path"], entry["mode"], entry["size"]) for entry in found] == [("/tmp/s/two", 600, 5)]
    assert answer("rm", sandbox_id, "/tmp/s/two") == [{"path": "/tmp/s/two", "status": "deleted"}]
    assert answer("rmdir", sandbox_id, "/tmp/s") == [{"path": "/tmp/s", "status": "removed"}]
    osb("file", "info", sandbox_id, "/tmp/s", code=1)


def test_names_cannot_drive_the_terminal(osb: Osb, sandbox_id: str, terminal: Callable[..., tuple[int, str]]) -> None:
    osb("command", "run", sandbox_id, "--", r"mkdir -p /tmp/evil; touch $'/tmp/evil/\e]0;owned\a\e[31m\n'")
    code, drawn = terminal("--no-color", "file", "search", sandbox_id, "/tmp/evil", "-p", "*")
    assert code == 0
    assert r"/tmp/evil/\x1b]0;owned\x07\x1b[31m\n" in drawn
    assert "\x1b]" not in drawn
    assert "\x1b[31m" not in drawn


def test_progress_is_shown_on_a_terminal_only(
    osb: Osb, sandbox_id: str, terminal: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    osb("command", "run", sandbox_id, "--", "head -c 20000000 /dev/zero > /tmp/zeros")
    assert osb("file", "download", sandbox_id, "/tmp/zeros", str(tmp_path / "quiet")).stderr == b""
    code, drawn = terminal("file", "download", sandbox_id, "/tmp/zeros", str(tmp_path / "shown"))
    assert code == 0
    assert "20.0 MB" in drawn
    assert (tmp_path / "shown").stat().st_size == 20000000


def test_cat_into_a_reader_that_leaves(
    start: Callable[..., subprocess.Popen[bytes]], osb: Osb, sandbox_id: str
) -> None:
    osb("command", "run", sandbox_id, "--", "head -c 5000000 /dev/zero > /tmp/many")
    process = start("file", "cat", sandbox_id, "/tmp/many")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait() == 141
    assert process.stderr.read() == b""


def test_a_file_goes_into_a_directory(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    local = tmp_path / "into.txt"
    local.write_bytes(EVERY_BYTE)
    osb("file", "mkdir", sandbox_id, "/tmp/into")
    for place in ("/tmp/into", "/tmp/into/"):
        assert "→ /tmp/into/into.txt" in osb("file", "upload", sandbox_id, str(local), place).stdout.decode()
        assert osb("file", "cat", sandbox_id, "/tmp/into/into.txt").stdout == EVERY_BYTE
        osb("file", "rm", sandbox_id, "/tmp/into/into.txt")
    said = osb("file", "upload", sandbox_id, "-", "/tmp/into", stdin=b"x", code=1).stderr.decode()
    assert said.startswith("error: /tmp/into is a directory\nhint: Name the file")


def test_list_and_watch(osb: Osb, start: Start, sandbox_id: str) -> None:
    osb("file", "mkdir", sandbox_id, "/srv/seen/deep")
    assert "/srv/seen/deep" in osb("file", "ls", sandbox_id, "/srv/seen").stdout.decode()
    watcher = start("-v", "file", "watch", "-r", sandbox_id, "/srv/seen", "-o", "json")
    assert watcher.stdout is not None
    assert watcher.stderr is not None
    assert watcher.stderr.readline() == b"osb: watching\n"
    osb("file", "write", sandbox_id, "/srv/seen/deep/new\x1b", "-c", "x")
    assert json.loads(watcher.stdout.readline()) == {
        "type": "create", "path": "/srv/seen/deep/new\x1b", "kind": "file",
    }  # fmt: skip
