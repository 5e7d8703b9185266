# SPDX-License-Identifier: Apache-2.0
"""Files: uploads part by part, downloads chunk by chunk, and the rest."""

from __future__ import annotations

import email.parser
import email.policy
import io
import json
import socket
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from stub import Received, Reply, Stub

from opensandbox import Sandbox
from opensandbox.exceptions import InvalidArgumentException, NotFoundException, SandboxConnectionException
from opensandbox.files import Files
from opensandbox.models import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.transport import Connection

Idle = Callable[[], Awaitable[bool]]
UPLOAD, DOWNLOAD = ("POST", "/e/files/upload"), ("GET", "/e/files/download")
INFO = {
    "path": "/a", "type": "file", "size": 1, "modified_at": "2026-01-01T00:00:00.123456789Z",
    "created_at": "2026-01-01T00:00:00Z", "owner": "root", "group": "root", "mode": 644,
}  # fmt: skip


def parts(received: Received) -> list[tuple[dict[str, Any] | None, str, bytes]]:
    """The parts of an upload, read by the standard library's parser: metadata or None, file name, bytes."""
    head = f"Content-Type: {received.headers['content-type']}\r\n\r\n".encode()
    message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + received.body)
    found = []
    for part in message.iter_parts():
        data = part.get_payload(decode=True)
        assert isinstance(data, bytes)
        name = part.get_param("name", header="content-disposition")
        found.append((json.loads(data) if name == "metadata" else None, str(part.get_filename()), data))
    return found


@pytest.mark.anyio
async def test_write_text_bytes_and_open_files(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    stub.routes[UPLOAD] = Reply()
    local = tmp_path / "local"
    local.write_bytes(b"skip me, keep\r\n--this\x00\xff")
    with local.open("rb") as file, io.StringIO("gr\u00fc\u00dfe") as text:
        file.seek(9)
        await sandbox.files.write_files(
            [
                WriteEntry(path="/a", data="gr\u00fc\u00df", mode=644, owner="nobody"),
                WriteEntry(path="/b", data=b"\x00\x01", mode=600),
                WriteEntry(path="/c", data=file),
            ]
        )
        await sandbox.files.write_file("/d", text, encoding="latin-1", group="users")
    first, second = stub.requests
    assert "transfer-encoding" not in first.headers
    assert second.headers["transfer-encoding"] == "chunked"
    got = parts(first)
    assert [part[0] for part in got if part[0]] == [
        {"path": "/a", "owner": "nobody", "mode": 644},
        {"path": "/b", "mode": 600},
        {"path": "/c", "mode": 755},
    ]
    assert [part[2] for part in got if not part[0]] == ["grüß".encode(), b"\x00\x01", b"keep\r\n--this\x00\xff"]
    assert all(part[1] == "metadata" for part in got if part[0])
    assert parts(second)[0][0] == {"path": "/d", "group": "users", "mode": 755}
    assert parts(second)[1][2] == "grüße".encode("latin-1")


@pytest.mark.anyio
async def test_nothing_to_write_sends_nothing(stub: Stub, sandbox: Sandbox) -> None:
    await sandbox.files.write_files([])
    with pytest.raises(InvalidArgumentException, match="no data for /a"):
        await sandbox.files.write_files([WriteEntry(path="/a")])
    assert not stub.requests


@pytest.mark.anyio
async def test_a_file_that_grows_meanwhile_is_sent_as_announced(stub: Stub, sandbox: Sandbox) -> None:
    class Growing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            at = self.tell()
            self.seek(0, io.SEEK_END)
            self.write(b"more")
            self.seek(at)
            return super().read(size)

    stub.routes[UPLOAD] = Reply()
    await sandbox.files.write_file("/log", Growing(b"12345"))
    assert parts(stub.requests[0])[1][2] == b"12345"


class Endless(io.RawIOBase):
    """A source that would not fit into memory if it were kept."""

    def __init__(self, size: int) -> None:
        self._left = size

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        size = min(size, self._left)
        self._left -= size
        return b"x" * size


@pytest.mark.anyio
async def test_uploads_and_downloads_take_constant_memory(sandbox: Sandbox, stub: Stub) -> None:
    """The stub's side is another process's in earnest, so only bytes are counted, never kept."""
    size = 64 << 20
    received = 0

    def serve() -> None:
        nonlocal received
        for _ in range(2):
            connection, _address = listener.accept()
            with connection, connection.makefile("rb") as reader:
                head = reader.readline()
                while reader.readline().strip():
                    pass
                if head.startswith(b"POST"):
                    while count := int(reader.readline(), 16):
                        received += count
                        while count:
                            count -= len(reader.read(min(count, 1 << 16)))
                        reader.readline()
                    reader.readline()
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                else:
                    lines = f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
                    connection.sendall(lines.encode())
                    for _ in range(size >> 16):
                        connection.sendall(b"y" * (1 << 16))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = threading.Thread(target=serve)
        served.start()
        port = listener.getsockname()[1]
        files = Files(Connection(sandbox.connection_config, f"http://127.0.0.1:{port}", {}))
        tracemalloc.start()
        try:
            await files.write_file("/big", Endless(size))
            got = 0
            async for chunk in await files.read_bytes_stream("/big"):
                assert len(chunk) <= 65536
                got += len(chunk)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        served.join()
    assert received > size
    assert got == size
    assert peak < 8 << 20, f"{peak >> 20} MiB at the peak"


@pytest.mark.anyio
async def test_read(stub: Stub, sandbox: Sandbox) -> None:
    stub.routes[DOWNLOAD] = Reply(200, "grüß".encode("latin-1"))
    assert await sandbox.files.read_file("/a b", encoding="latin-1") == "grüß"
    assert stub.requests[-1].params == [("path", "/a b")]
    stub.routes[DOWNLOAD] = Reply(206, b"12")
    assert await sandbox.files.read_bytes("/a", range_header="bytes=1-2") == b"12"
    assert stub.requests[-1].headers["range"] == "bytes=1-2"
    await sandbox.files.read_file("/a", offset=2, limit=3)
    assert stub.requests[-1].params == [("path", "/a"), ("offset", "2"), ("limit", "3")]
    stub.routes[DOWNLOAD] = Reply.error(404, "FILE_NOT_FOUND", "no such file: /x")
    with pytest.raises(NotFoundException, match="no such file"):
        await sandbox.files.read_file("/x")
    with pytest.raises(NotFoundException, match="no such file"):
        await sandbox.files.read_bytes_stream("/x")


@pytest.mark.anyio
async def test_a_stream_may_be_left_early_and_may_break(stub: Stub, sandbox: Sandbox, idle: Idle) -> None:
    stub.routes[DOWNLOAD] = Reply(200, b"x" * 10_000_000)
    async with await sandbox.files.read_bytes_stream("/a", chunk_size=10) as stream:
        assert await anext(stream) == b"x" * 10
    assert await idle()
    stub.routes[DOWNLOAD] = Reply(200, chunks=[b"half"], cut=True)
    with pytest.raises(SandboxConnectionException, match="broke"):
        async for _ in await sandbox.files.read_bytes_stream("/a"):
            pass


@pytest.mark.anyio
async def test_a_stream_read_to_its_end_gives_the_connection_back(stub: Stub, sandbox: Sandbox, idle: Idle) -> None:
    stub.routes[DOWNLOAD] = Reply(200, b"x" * 100_000)
    stream = await sandbox.files.read_bytes_stream("/a")
    assert sum([len(chunk) async for chunk in stream]) == 100_000
    assert await sandbox.files.read_bytes("/a") == b"x" * 100_000
    assert len({received.connection for received in stub.requests}) == 1
    await sandbox.close()
    assert await idle()


@pytest.mark.anyio
async def test_the_other_calls_send_what_the_protocol_wants(stub: Stub, sandbox: Sandbox) -> None:
    files = sandbox.files
    for method, path in [
        ("POST", "/directories"), ("DELETE", "/files"), ("DELETE", "/directories"), ("POST", "/files/mv"),
        ("POST", "/files/permissions"),
    ]:  # fmt: skip
        stub.routes[method, "/e" + path] = Reply()
    await files.create_directories([WriteEntry(path="/d", mode=700)])
    assert stub.requests[-1].json() == {"/d": {"mode": 700}}
    await files.delete_files(["/a", "/b c"])
    assert stub.requests[-1].params == [("path", "/a"), ("path", "/b c")]
    await files.delete_directories(["/d"])
    assert stub.requests[-1].params == [("path", "/d")]
    by_alias = MoveEntry.model_validate({"source": "/a", "destination": "/b"})
    await files.move_files([by_alias, MoveEntry(src="/c", dest="/d")])
    assert stub.requests[-1].json() == [{"src": "/a", "dest": "/b"}, {"src": "/c", "dest": "/d"}]
    await files.set_permissions([SetPermissionEntry(path="/a", mode=600, owner="nobody")])
    assert stub.requests[-1].json() == {"/a": {"mode": 600, "owner": "nobody"}}

    stub.routes["POST", "/e/files/replace"] = Reply()
    entry = ContentReplaceEntry(path="/a", old_content="x", new_content="")
    await files.replace_contents([entry])
    assert stub.requests[-1].params == [("verbose", "false")]
    assert stub.requests[-1].json() == {"/a": {"old": "x", "new": ""}}
    stub.routes["POST", "/e/files/replace"] = Reply.of({"/a": {"replacedCount": 3}})
    assert [(r.path, r.replaced_count) for r in await files.replace_contents_detailed([entry])] == [("/a", 3)]

    stub.routes["GET", "/e/files/search"] = Reply.of([INFO])
    assert (await files.search(SearchEntry(path="/", pattern="*.py")))[0].entry_type == "file"
    assert stub.requests[-1].params == [("path", "/"), ("pattern", "*.py")]
    stub.routes["GET", "/e/directories/list"] = Reply.of([INFO, {**INFO, "path": "/b", "type": "symlink"}])
    listed = await files.list_directory(DirectoryListEntry(path="/", depth=2))
    assert [entry.path for entry in listed] == ["/a", "/b"]
    assert stub.requests[-1].params == [("path", "/"), ("depth", "2")]
    stub.routes["GET", "/e/files/info"] = Reply.of({"/a": INFO})
    info = (await files.get_file_info(["/a"]))["/a"]
    assert (info.mode, info.modified_at.microsecond) == (644, 123456)


@pytest.mark.anyio
async def test_mistakes_are_caught_before_sending(stub: Stub, sandbox: Sandbox) -> None:
    with pytest.raises(InvalidArgumentException, match=r"\['/a'\]"):
        await sandbox.files.delete_files("/a")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentException, match="empty"):
        await sandbox.files.replace_contents([ContentReplaceEntry(path="/a", old_content="", new_content="x")])
    for mode in (-1, 888, 10000):
        with pytest.raises(ValidationError):
            WriteEntry(path="/a", mode=mode)
    with pytest.raises(ValidationError):
        WriteEntry(path=" ")
    assert not stub.requests


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mode": 999}, "mode: write the mode with its octal digits"),
        ({"path": ""}, "path: must not be blank"),
        ({"data": 5}, "data: "),
    ],
)
async def test_a_wrong_argument_of_a_file_is_refused_with_the_right_call(
    stub: Stub, sandbox: Sandbox, arguments: dict[str, Any], said: str
) -> None:
    with pytest.raises(InvalidArgumentException) as refused:
        await sandbox.files.write_file(**{"path": "/a", "data": "secret", **arguments})
    assert refused.value.message.startswith(said)
    assert refused.value.hint == 'Such as write_file("/tmp/note.txt", "text", mode=644).'
    assert "secret" not in str(refused.value)
    assert stub.requests == []


@pytest.mark.anyio
async def test_entries_are_lists_of_values(stub: Stub, sandbox: Sandbox) -> None:
    one: Any = WriteEntry(path="/a", data="x")
    plain: Any = {"path": "/a"}
    files = sandbox.files
    with pytest.raises(InvalidArgumentException, match=r"hint: Write \[WriteEntry\(\.\.\.\)\]"):
        await files.write_files(one)
    for call, kind in (
        (files.write_files, "WriteEntry"),
        (files.create_directories, "WriteEntry"),
        (files.move_files, "MoveEntry"),
        (files.set_permissions, "SetPermissionEntry"),
        (files.replace_contents, "ContentReplaceEntry"),
    ):
        with pytest.raises(InvalidArgumentException, match=f"takes a {kind}, not dict"):
            await call([plain])
    with pytest.raises(InvalidArgumentException, match="takes a SearchEntry, not dict"):
        await files.search(plain)
    with pytest.raises(InvalidArgumentException, match="takes a DirectoryListEntry, not dict"):
        await files.list_directory(plain)
    assert stub.requests == []
