# SPDX-License-Identifier: Apache-2.0
"""Files: uploads part by part, downloads chunk by chunk, and the rest."""

from __future__ import annotations

import email.parser
import email.policy
import hashlib
import io
import json
import os
import socket
import tarfile
import threading
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from stub import Received, Reply, Stub

from opensandbox import Sandbox
from opensandbox.exceptions import (
    InvalidArgumentException,
    NotFoundException,
    SandboxConnectionException,
    SandboxException,
    UnsupportedException,
)
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


# --- one file, raw ----------------------------------------------------------------------------------------

PUT, HEAD = ("PUT", "/e/files/content"), ("HEAD", "/e/files/content")


def written(received: Received) -> Reply:
    digest = hashlib.sha256(received.body).hexdigest()
    return Reply.of({"path": "/a", "size": len(received.body), "sha256": digest})


@pytest.mark.anyio
async def test_upload_from_a_path_a_file_and_an_iterator(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    stub.routes[PUT] = written
    local = tmp_path / "local"
    local.write_bytes(b"content")
    digest = hashlib.sha256(b"content").hexdigest()
    with local.open("rb") as file:
        for source in (local, str(local), file):
            found = await sandbox.files.upload(source, "/a", mode=640, owner="ada", fsync=True)
            assert (found.size, found.sha256) == (7, digest)
            assert stub.requests[-1].params == [("path", "/a"), ("mode", "640"), ("owner", "ada"), ("fsync", "true")]
            assert stub.requests[-1].headers["x-checksum-sha256"] == digest
            assert stub.requests[-1].headers["content-length"] == "7"
    assert (await sandbox.files.upload(iter([b"con", b"tent"]), "/a")).sha256 == digest
    assert stub.requests[-1].headers["transfer-encoding"] == "chunked"
    with pytest.raises(UnsupportedException):
        await sandbox.files_with_identity(1, 2).upload(local, "/a")
    assert stub.requests[-1].path == "/e/v1/filesystem/1/2/files/content"


@pytest.mark.anyio
async def test_what_can_be_sent_once_is_sent_once(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    stub.routes[PUT] = [None, Reply.of({"path": "/a", "size": 1, "sha256": "0" * 64})]
    with pytest.raises(SandboxConnectionException):
        await sandbox.files.upload(iter([b"x"]), "/a")
    assert len(stub.requests) == 1
    with pytest.raises(SandboxException, match="/a is not what was sent"):
        await sandbox.files.upload(iter([b"x"]), "/a")
    # A file is read again for another attempt.
    (tmp_path / "local").write_bytes(b"x")
    stub.routes[PUT] = lambda received: written(received) if len(stub.requests) == 4 else None
    assert (await sandbox.files.upload(tmp_path / "local", "/a")).size == 1
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.upload(iter([b"x"]), "/a", resume=True)
    with pytest.raises(InvalidArgumentException):
        await sandbox.files.upload(7, "/a")  # type: ignore[arg-type]


class Partial:
    """A file that gathers part by part; some connections break in the middle."""

    def __init__(self, stub: Stub, before: bytes, breaks: int) -> None:
        self.data, self.breaks, self.offsets = before, breaks, list[int]()
        stub.routes[HEAD] = lambda _: Reply(200, headers={"Upload-Offset": str(len(self.data))})
        stub.routes[PUT] = self.put

    def put(self, received: Received) -> Reply | None:
        params = dict(received.params)
        self.offsets.append(int(params["offset"]))
        assert params["final"] == "true"
        kept = self.data[: self.offsets[-1]]
        if self.breaks:
            self.breaks -= 1
            self.data = kept + received.body[: len(received.body) // 2]
            return None
        if hashlib.sha256(kept + received.body).hexdigest() != received.headers["x-checksum-sha256"]:
            return Reply.error(400, "INVALID_FILE_CONTENT", "another digest")
        self.data = kept + received.body
        return written(Received("PUT", "/", {}, self.data, 0))


@pytest.mark.anyio
async def test_an_upload_goes_on_where_it_broke(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(bytes(range(256)) * 4)
    partial = Partial(stub, local.read_bytes()[:24], breaks=5)
    found = await sandbox.files.upload(local, "/a", resume=True)
    assert (found.size, partial.data) == (1024, local.read_bytes())
    assert partial.offsets == [24, 524, 774, 899, 961, 992]
    # Without any progress it is given up.
    Partial(stub, b"", breaks=0)
    stub.routes[PUT] = lambda _: None
    stub.requests.clear()
    with pytest.raises(SandboxConnectionException):
        await sandbox.files.upload(local, "/a", resume=True)
    assert [received.method for received in stub.requests] == ["HEAD", *["PUT", "HEAD"] * 4]


@pytest.mark.anyio
async def test_what_was_begun_with_another_file_is_thrown_away(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    local = tmp_path / "local"
    local.write_bytes(b"content")
    partial = Partial(stub, b"oth", breaks=0)
    assert (await sandbox.files.upload(local, "/a", resume=True)).size == 7
    assert (partial.data, partial.offsets) == (b"content", [3, 0])
    longer = Partial(stub, b"much longer than it", breaks=0)
    await sandbox.files.upload(local, "/a", resume=True)
    assert longer.offsets == [0]


@pytest.mark.anyio
async def test_chunks_have_a_size(stub: Stub, sandbox: Sandbox) -> None:
    sizes: list[Any] = [0, -1, None, "64k"]
    for size in sizes:
        with pytest.raises(InvalidArgumentException, match="chunk_size"):
            await sandbox.files.read_bytes_stream("/a", chunk_size=size)
        with pytest.raises(InvalidArgumentException, match="chunk_size"):
            await sandbox.files.read_tar("/a", chunk_size=size)
    assert not stub.requests


# --- trees ------------------------------------------------------------------------------------------------

TAR = "/e/files/tar"


@pytest.mark.anyio
async def test_a_directory_goes_up_as_an_archive(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    stub.routes["POST", TAR] = Reply.of({"path": "/d", "entries": 6, "bytes": 1000})
    top = tmp_path / "top"
    (top / "empty").mkdir(parents=True)
    (top / "file").write_bytes(b"x" * 1000)
    (top / "file").chmod(0o751)
    os.utime(top / "file", ns=(1, 1_700_000_000_123_456_789))
    (top / "link").symlink_to("/etc/passwd")
    os.link(top / "file", top / "same")
    os.mkfifo(top / "pipe")
    result = await sandbox.files.upload_tar(top, "/d")
    assert (result.entries, result.bytes) == (6, 1000)
    assert stub.requests[-1].params == [("path", "/d"), ("owners", "false")]
    with tarfile.open(fileobj=io.BytesIO(stub.requests[-1].body)) as archive:
        assert archive.getnames() == [".", "empty", "file", "link", "same"]
        file, link, same = (archive.getmember(name) for name in ("file", "link", "same"))
        assert (file.mode, file.size, file.pax_headers["mtime"]) == (0o751, 1000, "1700000000.123456789")
        assert (link.linkname, same.islnk(), same.linkname) == ("/etc/passwd", True, "file")
        assert {member.uname for member in archive} == {""}
    for source in (iter([b"an ", b"archive"]), io.BytesIO(b"an archive")):
        await sandbox.files.upload_tar(source, "/d", owners=True)
        assert stub.requests[-1].body == b"an archive"


def archive_of(*members: tuple[str, bytes, str]) -> bytes:
    """Names, types and link targets."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for name, kind, target in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, target, 4 if kind == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(b"evil"))
    return whole.getvalue()


@pytest.mark.anyio
async def test_an_archive_comes_down_into_a_directory(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    good = archive_of((".", tarfile.DIRTYPE, ""), ("a/b", tarfile.REGTYPE, ""), ("l", tarfile.SYMTYPE, "a/b"))
    stub.routes["GET", TAR] = Reply(200, chunks=[good[:700], good[700:701], good[701:]])
    await sandbox.files.download_tar("/d", tmp_path / "new" / "place")
    assert (tmp_path / "new" / "place" / "l").read_bytes() == b"evil"
    assert stub.requests[-1].params == [("path", "/d"), ("gzip", "false")]
    whole = io.BytesIO()
    await sandbox.files.download_tar("/d", whole, gzip=True)
    assert whole.getvalue() == good
    # A connection that breaks off behind the last entry is told, too.
    stub.routes["GET", TAR] = Reply(200, chunks=[good, bytes(1 << 20)], cut=True)
    with pytest.raises(SandboxConnectionException):
        await sandbox.files.download_tar("/d", tmp_path / "cut")


@pytest.mark.parametrize(
    "members",
    [
        [("../out", tarfile.REGTYPE, "")],
        [("a/../../out", tarfile.REGTYPE, "")],
        [("d/l", tarfile.SYMTYPE, ".."), ("d/l/out", tarfile.REGTYPE, "")],
        [("h", tarfile.LNKTYPE, "../secret")],
        [("null", tarfile.CHRTYPE, "")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [(".", tarfile.SYMTYPE, "a")],
    ],
)
@pytest.mark.anyio
async def test_an_archive_of_a_hostile_sandbox_stays_in_its_place(
    stub: Stub, sandbox: Sandbox, tmp_path: Path, members: list[tuple[str, bytes, str]]
) -> None:
    (tmp_path / "secret").write_text("secret")
    stub.routes["GET", TAR] = Reply(200, chunks=[archive_of(*members)])
    with pytest.raises(SandboxException, match="cannot be extracted"):
        await sandbox.files.download_tar("/d", tmp_path / "in")
    assert sorted(os.listdir(tmp_path)) == ["in", "secret"]
    assert not [name for _, _, files in os.walk(tmp_path / "in") for name in files]
    # An absolute name is taken as one below.
    stub.routes["GET", TAR] = Reply(200, chunks=[archive_of((f"{tmp_path}/out", tarfile.REGTYPE, ""))])
    await sandbox.files.download_tar("/d", tmp_path / "in")
    assert not (tmp_path / "out").exists()


@pytest.mark.anyio
async def test_links_that_lead_out_are_left_out_and_told(
    stub: Stub, sandbox: Sandbox, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = ["/usr/bin/python3", "../up", "d/e/back/../x", "", "/"]
    members = [(f"out{number}", tarfile.SYMTYPE, target) for number, target in enumerate(out)]
    members += [("d/e/back", tarfile.SYMTYPE, "../.."), ("d/e/far", tarfile.SYMTYPE, "../../..")]
    # Behind a link that was left out there is only a directory of that name.
    members += [("out1/file", tarfile.REGTYPE, ""), ("same", tarfile.LNKTYPE, "d/e/back")]
    stub.routes["GET", TAR] = Reply(200, chunks=[archive_of(*members)])
    await sandbox.files.download_tar("/d", tmp_path / "in")
    assert sorted(os.listdir(tmp_path)) == ["in"]
    links = [Path(folder, name) for folder, below, files in os.walk(tmp_path / "in") for name in below + files]
    assert [link for link in links if link.is_symlink()] == [tmp_path / "in" / "d" / "e" / "back"]
    assert (tmp_path / "in" / "out1" / "file").read_bytes() == b"evil"
    assert "left out 7 links" in caplog.text
    assert "'out0'" in caplog.text
    caplog.clear()
    many = [(f"name{number}", tarfile.SYMTYPE, "/x") for number in range(1000)]
    stub.routes["GET", TAR] = Reply(200, chunks=[archive_of(*many)])
    await sandbox.files.download_tar("/d", tmp_path / "in")
    assert "left out 1000 links" in caplog.text
    assert caplog.text.count("'name") == 10


@pytest.mark.anyio
async def test_a_tree_comes_down_a_second_time(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    tree = [("a", tarfile.REGTYPE, ""), ("same", tarfile.LNKTYPE, "a"), ("l", tarfile.SYMTYPE, "a")]
    stub.routes["GET", TAR] = Reply(200, chunks=[archive_of(*tree)])
    mine = tmp_path / "mine"
    for _ in range(2):
        await sandbox.files.download_tar("/d", tmp_path / "in")
        assert (tmp_path / "in" / "a").stat().st_ino == (tmp_path / "in" / "same").stat().st_ino
        # What was there is replaced, and not written through.
        mine.write_text("mine")
        for name in ("a", "same", "l"):
            (tmp_path / "in" / name).unlink()
        (tmp_path / "in" / "l").symlink_to(mine)
        os.link(mine, tmp_path / "in" / "a")
    await sandbox.files.download_tar("/d", tmp_path / "in")
    assert (mine.read_text(), (tmp_path / "in" / "l").read_bytes()) == ("mine", b"evil")
    assert (tmp_path / "in" / "same").stat().st_nlink == 2
    await sandbox.files.download_tar("/d", tmp_path / "in")
    assert (tmp_path / "in" / "same").stat().st_nlink == 2


@pytest.mark.anyio
async def test_a_hostile_sandbox_does_not_fill_the_disk(stub: Stub, sandbox: Sandbox, tmp_path: Path) -> None:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w:gz") as archive:
        info = tarfile.TarInfo("zeros")
        info.size = 8 << 20
        archive.addfile(info, io.BytesIO(bytes(info.size)))
    stub.routes["GET", TAR] = Reply(200, chunks=[whole.getvalue()])
    with pytest.raises(SandboxException, match="more than 1000000 bytes") as raised:
        await sandbox.files.download_tar("/d", tmp_path / "in", gzip=True, max_bytes=1000000)
    assert "max_bytes" in (raised.value.hint or "")
    assert os.listdir(tmp_path / "in") == []
    with pytest.raises(SandboxException, match="more than 100 bytes"):
        await sandbox.files.download_tar("/d", io.BytesIO(), max_bytes=100)
    await sandbox.files.download_tar("/d", tmp_path / "in", gzip=True, max_bytes=None)
    assert (tmp_path / "in" / "zeros").stat().st_size == 8 << 20
    assert (tmp_path / "in" / "zeros").stat().st_blocks * 512 < 1 << 20
    # A header says that the file has a hole of a terabyte, and is some bytes long itself.
    header = tarfile.TarInfo("hole")
    header.pax_headers = {
        "GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,0",
    }  # fmt: skip
    hole = header.tobuf(tarfile.PAX_FORMAT) + bytes(1024)
    long = tarfile.TarInfo("././@LongLink")
    long.type, long.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    for hostile, why in ((hole, "more than"), (long.tobuf(tarfile.GNU_FORMAT) + bytes(1024), "a header of")):
        stub.routes["GET", TAR] = Reply(200, chunks=[hostile])
        with pytest.raises(SandboxException, match=why):
            await sandbox.files.download_tar("/d", tmp_path / "in")
    empty = archive_of(*((f"d{number}", tarfile.DIRTYPE, "") for number in range(100)))
    stub.routes["GET", TAR] = Reply(200, chunks=[empty])
    with pytest.raises(SandboxException, match="more than 5000 bytes"):
        await sandbox.files.download_tar("/d", tmp_path / "in", max_bytes=5000)


# --- changes ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_changes_as_they_happen(stub: Stub, sandbox: Sandbox, idle: Idle) -> None:
    events = [
        b'data: {"type":"create","path":"/d/a","kind":"file"}\n\ndata: {"type":"mo',
        b've","path":"/d/a","to":"/d/b","kind":"file"}\n\n: still here\n\n',
        b'data: {"type":"overflow","path":"/d","kind":"directory","message":"too slow"}\n\n',
    ]
    stub.routes["GET", "/e/files/watch"] = Reply(200, chunks=events)
    async with await sandbox.files.watch("/d", recursive=True) as changes:
        seen = [(change.type, change.path, change.to, change.message) async for change in changes]
    assert seen == [
        ("create", "/d/a", None, None), ("move", "/d/a", "/d/b", None), ("overflow", "/d", None, "too slow"),
    ]  # fmt: skip
    assert stub.requests[-1].params == [("path", "/d"), ("recursive", "true")]
    # Whoever has seen enough lets go of the connection.
    stub.routes["GET", "/e/files/watch"] = Reply(200, chunks=[events[0] + events[1]] * 10_000)
    async with await sandbox.files.watch("/d") as changes:
        async for _ in changes:
            break
    assert await idle()


@pytest.mark.anyio
async def test_figures_every_second(stub: Stub, sandbox: Sandbox) -> None:
    figures = {"cpu_count": 1, "cpu_used_pct": 2, "mem_total_mib": 3, "mem_used_mib": 4, "timestamp": 5, "pids": 6}
    line = json.dumps(figures).encode() + b"\n"
    stub.routes["GET", "/e/metrics/watch"] = Reply(200, chunks=[line, line[:9], line[9:] + line])
    assert [now.pids async for now in await sandbox.metrics.watch()] == [6, 6, 6]
    stub.routes["GET", "/e/metrics/prometheus"] = Reply(200, b"# EOF\n")
    assert await sandbox.metrics.prometheus() == "# EOF\n"
