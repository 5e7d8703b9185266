# SPDX-License-Identifier: Apache-2.0
"""`files_with_identity`: every call of `sandbox.files` with the rights of another user."""

from __future__ import annotations

import io

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

UID, GID = 4321, 8765
OWNED = f"{UID}:{GID}"


async def text_of(sandbox: Sandbox, command: str) -> str:
    execution = await sandbox.commands.run(command)
    assert execution.exit_code == 0, execution
    return execution.text


async def place(sandbox: Sandbox, name: str) -> str:
    """A directory that belongs to the user."""
    path = f"/tmp/identity-{name}"
    await text_of(sandbox, f"mkdir -p {path} && chown {OWNED} {path}")
    return path


@check
async def what_is_written_belongs_to_the_user(sandbox: Sandbox) -> None:
    files, top = sandbox.files_with_identity(UID, GID), await place(sandbox, "write")
    await files.write_file(f"{top}/a", "text", mode=640)
    await files.write_files([WriteEntry(path=f"{top}/b/c", data=io.BytesIO(b"bytes"), mode=600)])
    await files.create_directories([WriteEntry(path=f"{top}/d", mode=700)])
    owners = await text_of(sandbox, f"stat -c %u:%g:%a {top}/a {top}/b/c {top}/d")
    assert owners == f"{OWNED}:640\n{OWNED}:600\n{OWNED}:700"
    assert await files.read_file(f"{top}/a") == "text"
    assert await files.read_bytes(f"{top}/b/c", range_header="bytes=1-2") == b"yt"
    assert b"".join([chunk async for chunk in await files.read_bytes_stream(f"{top}/b/c")]) == b"bytes"


@check
async def what_is_closed_to_the_user_stays_closed(sandbox: Sandbox) -> None:
    files = sandbox.files_with_identity(UID, GID)
    await text_of(sandbox, "mkdir -p -m 700 /tmp/of-root && echo secret > /tmp/of-root/file")
    await text_of(sandbox, "echo secret > /tmp/readable && chmod 644 /tmp/readable")
    calls = {
        "read": files.read_file("/tmp/of-root/file"),
        "info": files.get_file_info(["/tmp/of-root/file"]),
        "list": files.list_directory(DirectoryListEntry(path="/tmp/of-root")),
        "write": files.write_file("/tmp/of-root/new", "x"),
        "write over": files.write_file("/tmp/readable", "x"),
        "replace": files.replace_contents([ContentReplaceEntry(path="/tmp/readable", old_content="s", new_content="")]),
        "chmod": files.set_permissions([SetPermissionEntry(path="/tmp/readable", mode=666)]),
        "move": files.move_files([MoveEntry(src="/tmp/of-root/file", dest="/tmp/taken")]),
        "make": files.create_directories([WriteEntry(path="/tmp/of-root/d")]),
    }
    for name, call in calls.items():
        error = await raises(SandboxApiException, call)
        assert error.status_code >= 400, (name, error)
        assert error.error.code, (name, error)
    assert await files.read_file("/tmp/readable") == "secret\n"
    assert await text_of(sandbox, "stat -c %u:%a /tmp/readable; ls /tmp/of-root") == "0:644\nfile"


@check
async def everything_else_works(sandbox: Sandbox) -> None:
    files, top = sandbox.files_with_identity(UID, GID), await place(sandbox, "rest")
    await files.write_files([WriteEntry(path=f"{top}/{name}", data="one two", mode=644) for name in ("a.txt", "b.md")])
    assert (await files.get_file_info([f"{top}/a.txt"]))[f"{top}/a.txt"].size == 7
    assert [entry.path for entry in await files.search(SearchEntry(path=top, pattern="*.md"))] == [f"{top}/b.md"]
    listed = await files.list_directory(DirectoryListEntry(path=top, depth=1))
    assert [entry.path for entry in listed] == [f"{top}/a.txt", f"{top}/b.md"]
    entry = ContentReplaceEntry(path=f"{top}/a.txt", old_content="one", new_content="1")
    assert [one.replaced_count for one in await files.replace_contents_detailed([entry])] == [1]
    await files.set_permissions([SetPermissionEntry(path=f"{top}/a.txt", mode=600)])
    await files.move_files([MoveEntry(src=f"{top}/a.txt", dest=f"{top}/deep/c.txt")])
    assert await text_of(sandbox, f"stat -c %u:%g:%a {top}/deep/c.txt") == f"{OWNED}:600"
    await files.delete_files([f"{top}/deep/c.txt", f"{top}/never was"])
    await files.delete_directories([f"{top}/deep"])
    assert await text_of(sandbox, f"ls {top}") == "b.md"


run(opened)
