# SPDX-License-Identifier: Apache-2.0
"""Every call of `sandbox.files`."""

from __future__ import annotations

import io
import os
from datetime import UTC, datetime, timedelta

from checks import check, raises, run
from sdk import Sandbox
from world import opened

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)

BIG = os.urandom(5_000_000)


async def expect(status: int, call: object) -> None:
    error = await raises(SandboxApiException, call)
    assert error.status_code == status, error


async def text_of(sandbox: Sandbox, command: str) -> str:
    execution = await sandbox.commands.run(command)
    assert execution.exit_code == 0, execution
    return execution.text


@check
async def write_file_and_read_file(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/hello.txt", "Hello World", mode=644)
    assert await sandbox.files.read_file("/tmp/hello.txt") == "Hello World"
    assert await text_of(sandbox, "stat -c %a /tmp/hello.txt") == "644"
    await sandbox.files.write_file("/tmp/hello.txt", "short")
    assert await sandbox.files.read_file("/tmp/hello.txt") == "short", "written anew, not over"


@check
async def write_files_of_every_kind(sandbox: Sandbox) -> None:
    entries = [
        WriteEntry(path="/tmp/w/text", data="grüß\n", mode=600),
        WriteEntry(path="/tmp/w/deeper/still/bytes", data=b"\x00\xff\r\n--boundary\r\n", mode=755),
        WriteEntry(path="/tmp/w/stream", data=io.BytesIO(BIG), mode=640),
        WriteEntry(path="/tmp/w/latin", data="grüß", encoding="latin-1"),
        WriteEntry(path="/tmp/w/empty", data=""),
        WriteEntry(path="/tmp/w/with space & ünï ✓", data="name"),
    ]
    await sandbox.files.write_files(entries)
    assert await sandbox.files.read_bytes("/tmp/w/text") == "grüß\n".encode()
    assert await sandbox.files.read_bytes("/tmp/w/deeper/still/bytes") == b"\x00\xff\r\n--boundary\r\n"
    assert await sandbox.files.read_bytes("/tmp/w/stream") == BIG
    assert await sandbox.files.read_file("/tmp/w/latin", encoding="latin-1") == "grüß"
    assert await sandbox.files.read_bytes("/tmp/w/empty") == b""
    assert await sandbox.files.read_file("/tmp/w/with space & ünï ✓") == "name"


@check
async def write_with_an_owner(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/owned", "x", mode=600, owner="nobody", group="nogroup")
    assert await text_of(sandbox, "stat -c %U:%G:%a /tmp/owned") == "nobody:nogroup:600"


@check
async def write_to_a_place_that_is_no_file(sandbox: Sandbox) -> None:
    error = await raises(SandboxApiException, sandbox.files.write_file("/tmp", "x"))
    assert error.status_code >= 400, error


@check
async def read_parts(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/lines", "one\ntwo\r\nthree\nfour\n")
    assert await sandbox.files.read_file("/tmp/lines", offset=2, limit=2) == "two\nthree"
    assert await sandbox.files.read_file("/tmp/lines", offset=4) == "four"
    assert await sandbox.files.read_file("/tmp/lines", limit=1) == "one"
    assert await sandbox.files.read_bytes("/tmp/lines", range_header="bytes=4-6") == b"two"
    assert await sandbox.files.read_bytes("/tmp/lines", range_header="bytes=-5") == b"four\n"
    assert await sandbox.files.read_bytes("/tmp/lines", range_header="bytes=14-") == b"\nfour\n"
    await expect(416, sandbox.files.read_bytes("/tmp/lines", range_header="bytes=900-"))


@check
async def read_what_does_not_exist(sandbox: Sandbox) -> None:
    await expect(404, sandbox.files.read_file("/no/such/file"))


@check
async def read_bytes_stream(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/big", BIG)
    received = b""
    async for chunk in await sandbox.files.read_bytes_stream("/tmp/big", chunk_size=10_000):
        assert 0 < len(chunk) <= 10_000
        received += chunk
    assert received == BIG


@check
async def paths_are_expanded(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("~/at-home", "home")
    assert await sandbox.files.read_file("$HOME/at-home") == "home"
    assert await sandbox.files.read_file("${HOME}/at-home") == "home"
    await raises(SandboxApiException, sandbox.files.read_file("$NO_SUCH_VARIABLE/x"))


@check
async def create_directories(sandbox: Sandbox) -> None:
    await sandbox.files.create_directories(
        [WriteEntry(path="/tmp/d/e/f", mode=700), WriteEntry(path="/tmp/d2", mode=644)]
    )
    assert await text_of(sandbox, "stat -c %a:%F /tmp/d/e/f /tmp/d2") == "700:directory\n644:directory"
    await sandbox.files.create_directories([WriteEntry(path="/tmp/d2", mode=755)])
    assert await text_of(sandbox, "stat -c %a /tmp/d2") == "644", "the mode is that of a directory made by the call"


@check
async def get_file_info(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/info file", b"12345", mode=640)
    await text_of(sandbox, "ln -sf '/tmp/info file' /tmp/info-link; mkdir -p /tmp/info-dir")
    found = await sandbox.files.get_file_info(["/tmp/info file", "/tmp/info-link", "/tmp/info-dir"])
    info = found["/tmp/info file"]
    assert (info.path, info.entry_type, info.size, info.mode) == ("/tmp/info file", "file", 5, 640)
    assert (info.owner, info.group) == ("root", "root")
    for at in (info.created_at, info.modified_at):
        assert abs(datetime.now(UTC) - at) < timedelta(seconds=30)
    assert found["/tmp/info-link"].entry_type == "symlink", "the link, not what it points to"
    assert found["/tmp/info-dir"].entry_type == "directory"
    await expect(404, sandbox.files.get_file_info(["/tmp/info file", "/no/such/file"]))


@check
async def set_permissions(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/perm", "x", mode=644)
    await sandbox.files.set_permissions(
        [SetPermissionEntry(path="/tmp/perm", mode=600, owner="nobody", group="nogroup")]
    )
    assert await text_of(sandbox, "stat -c %U:%G:%a /tmp/perm") == "nobody:nogroup:600"
    await sandbox.files.set_permissions([SetPermissionEntry(path="/tmp/perm", mode=4755)])
    assert (await sandbox.files.get_file_info(["/tmp/perm"]))["/tmp/perm"].mode == 4755
    await expect(404, sandbox.files.set_permissions([SetPermissionEntry(path="/no/such/file", mode=600)]))


@check
async def move_files(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/from", "moved")
    await sandbox.files.move_files([MoveEntry(src="/tmp/from", dest="/tmp/new place/to")])
    assert await sandbox.files.read_file("/tmp/new place/to") == "moved"
    await expect(404, sandbox.files.read_file("/tmp/from"))
    await expect(404, sandbox.files.move_files([MoveEntry(src="/tmp/from", dest="/tmp/x")]))
    await sandbox.files.write_file("/tmp/there", "stays")
    await expect(500, sandbox.files.move_files([MoveEntry(src="/tmp/new place/to", dest="/tmp/there")]))
    assert await sandbox.files.read_file("/tmp/there") == "stays"


@check
async def replace_contents(sandbox: Sandbox) -> None:
    await sandbox.files.write_file("/tmp/r", "a.b.a.", mode=751)
    await sandbox.files.replace_contents([ContentReplaceEntry(path="/tmp/r", old_content="a.", new_content="X")])
    assert await sandbox.files.read_file("/tmp/r") == "Xb.X"
    entries = [
        ContentReplaceEntry(path="/tmp/r", old_content="X", new_content=""),
        ContentReplaceEntry(path="/tmp/hello.txt", old_content="nowhere in it", new_content="x"),
    ]
    results = {r.path: r.replaced_count for r in await sandbox.files.replace_contents_detailed(entries)}
    assert results == {"/tmp/r": 2, "/tmp/hello.txt": 0}
    assert await text_of(sandbox, "stat -c %a /tmp/r") == "751"
    missing = [ContentReplaceEntry(path="/no/such/file", old_content="a", new_content="b")]
    await expect(404, sandbox.files.replace_contents(missing))


@check
async def search(sandbox: Sandbox) -> None:
    files = ["/tmp/s/a.py", "/tmp/s/sub/b.py", "/tmp/s/sub/c.txt", "/tmp/s/sub/dir.py/d.md"]
    await sandbox.files.write_files([WriteEntry(path=path, data="x") for path in files])

    async def found(pattern: str) -> list[str]:
        return sorted(entry.path for entry in await sandbox.files.search(SearchEntry(path="/tmp/s", pattern=pattern)))

    assert await found("*.py") == ["/tmp/s/a.py", "/tmp/s/sub/b.py"], "files only, by their base name"
    assert await found("**") == sorted(files)
    assert await found("?.{txt,md}") == ["/tmp/s/sub/c.txt", "/tmp/s/sub/dir.py/d.md"]
    assert await found("[ab].py") == ["/tmp/s/a.py", "/tmp/s/sub/b.py"]
    assert await found("none*") == []
    await expect(404, sandbox.files.search(SearchEntry(path="/no/such/place", pattern="*")))


@check
async def list_directory(sandbox: Sandbox) -> None:
    async def listed(depth: int | None) -> list[tuple[str, str]]:
        entries = await sandbox.files.list_directory(DirectoryListEntry(path="/tmp/s", depth=depth))
        return [(entry.path, entry.entry_type) for entry in entries]

    one = [("/tmp/s/a.py", "file"), ("/tmp/s/sub", "directory")]
    assert await listed(None) == one
    assert await listed(1) == one
    assert [path for path, _ in await listed(2)] == [
        "/tmp/s/a.py", "/tmp/s/sub", "/tmp/s/sub/b.py", "/tmp/s/sub/c.txt", "/tmp/s/sub/dir.py",
    ]  # fmt: skip
    assert await listed(0) == []
    await expect(400, sandbox.files.list_directory(DirectoryListEntry(path="/tmp/s/a.py")))
    await expect(404, sandbox.files.list_directory(DirectoryListEntry(path="/no/such/place")))


@check
async def delete_files(sandbox: Sandbox) -> None:
    await sandbox.files.delete_files(["/tmp/s/a.py", "/tmp/new place/to", "/tmp/never was"])
    await expect(404, sandbox.files.read_file("/tmp/s/a.py"))
    await expect(404, sandbox.files.read_file("/tmp/new place/to"))
    await expect(500, sandbox.files.delete_files(["/tmp/s"]))


@check
async def delete_directories(sandbox: Sandbox) -> None:
    await sandbox.files.delete_directories(["/tmp/s", "/tmp/never was"])
    await expect(404, sandbox.files.get_file_info(["/tmp/s"]))


run(opened)
