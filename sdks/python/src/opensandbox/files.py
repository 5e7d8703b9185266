# SPDX-License-Identifier: Apache-2.0
"""Files and directories of a sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from io import IOBase
from types import TracebackType
from typing import Any, Self

from opensandbox import archive, models
from opensandbox.answers import translated
from opensandbox.concurrency import Pieces, in_thread, pulled, sleep
from opensandbox.content import Content, Counted, opened, raw_headers, sha256_of
from opensandbox.exceptions import (
    ConflictException,
    InvalidArgumentException,
    SandboxApiException,
    SandboxConnectionException,
    SandboxException,
    UnavailableException,
)
from opensandbox.multipart import Upload
from opensandbox.streams import Watch
from opensandbox.transport import NO_RETRIES, Connection
from opensandbox.wire.errors import Code

_ARRIVED = "Upload-Offset"
# What is sent as a whole is answered when all of it has been written.
_WRITTEN_LIMIT = timedelta(hours=1)
# What a sandbox sends as a tree fills a disk of this machine.
_MOST_FETCHED = 16 << 30

Local = str | os.PathLike[str]


class ByteStream:
    """The content of a file as it arrives. Iterate it to its end, or close it (`async with` does)."""

    def __init__(self, chunks: AsyncIterator[bytes], stack: AsyncExitStack, base_url: str) -> None:
        self._chunks = chunks
        self._stack = stack
        self._base_url = base_url

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            with translated("GET", self._base_url):
                return await anext(self._chunks)
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop reading and give the connection back."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Files:
    """`sandbox.files`

        await sandbox.files.write_file("/tmp/hello.txt", "hello", mode=644)
        text = await sandbox.files.read_file("/tmp/hello.txt")

    Paths may begin with `~` and contain `$VAR`; both are expanded inside the sandbox.
    """

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def read_file(
        self,
        path: str,
        *,
        encoding: str = "utf-8",
        range_header: str | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> str:
        """The file as text. `offset` (from 1) and `limit` count lines; `range_header` is `bytes=0-99`."""
        data = await self.read_bytes(path, range_header=range_header, offset=offset, limit=limit)
        return data.decode(encoding)

    async def read_bytes(
        self, path: str, *, range_header: str | None = None, offset: int | None = None, limit: int | None = None
    ) -> bytes:
        """The file as bytes."""
        params, headers = _part_of(path, range_header, offset, limit)
        return (await self._execd.call("GET", "/files/download", params=params, headers=headers)).content

    async def read_bytes_stream(
        self,
        path: str,
        *,
        chunk_size: int = 65536,
        range_header: str | None = None,
        offset: int | None = None,
        limit: int | None = None,
    ) -> ByteStream:
        """The file in chunks, for files that should not be held in memory as a whole.

            async for chunk in await sandbox.files.read_bytes_stream("/etc/passwd"):
                print(len(chunk))

        Read it to its end, or close it.
        """
        _expect_some(chunk_size)
        params, headers = _part_of(path, range_header, offset, limit)
        stack = AsyncExitStack()
        response = await stack.enter_async_context(
            self._execd.stream("GET", "/files/download", params=params, headers=headers)
        )
        return ByteStream(response.aiter_raw(chunk_size), stack, self._execd.base_url)

    async def write_file(
        self,
        path: str,
        data: str | bytes | IOBase,
        *,
        encoding: str = "utf-8",
        mode: int = 755,
        owner: str | None = None,
        group: str | None = None,
    ) -> None:
        """Write a file, and the directories above it. An open file is streamed."""
        entry = models.base.of_arguments(
            models.WriteEntry,
            'Such as write_file("/tmp/note.txt", "text", mode=644).',
            path=path,
            data=data,
            mode=mode,
            owner=owner,
            group=group,
            encoding=encoding,
        )
        await self.write_files([entry])

    async def write_files(self, entries: list[models.WriteEntry]) -> None:
        """Write several files in one request."""
        models.base.expect_each(entries, models.WriteEntry)
        if not entries:
            return
        upload = Upload(entries)
        length = upload.length
        headers = {"Content-Type": upload.content_type}
        headers |= {"Content-Length": str(length)} if length is not None else {"Transfer-Encoding": "chunked"}
        await self._execd.call("POST", "/files/upload", body=upload.chunks, headers=headers)

    async def upload(
        self,
        source: Local | IOBase | Pieces,
        path: str,
        *,
        mode: int | None = None,
        owner: str | None = None,
        group: str | None = None,
        resume: bool = False,
        fsync: bool = False,
    ) -> models.FileContent:
        """Send a local file, named by its path, or an open file, or an iterator of bytes. Only a chunk is in memory.

            written = await sandbox.files.upload("/etc/passwd", "/tmp/copy", mode=600)
            print(written.size, written.sha256)

        The file is there whole, or not at all, and its SHA-256 is compared. Without a mode it keeps the one it had, or
        gets 644. `resume` goes on where an upload of the same file was broken off, this one's connection included; it
        needs something that can be read again from the middle, such as a file. `fsync` waits for the disk.
        """
        given = {"path": path, "mode": mode, "owner": owner, "group": group, "fsync": "true" if fsync else None}
        params = [(name, str(value)) for name, value in given.items() if value is not None]
        async with opened(source) as content:
            if not resume:
                return await self._put(content, params)
            if not content.repeatable or content.size is None:
                raise InvalidArgumentException(
                    "resume needs a file that can be read from the middle", hint="Give the path of a local file."
                )
            return await self._put_the_rest(content, content.size, params)

    async def _put(self, content: Content, params: list[tuple[str, str]]) -> models.FileContent:
        headers = raw_headers(content.size)
        if content.repeatable:
            headers["X-Checksum-SHA256"] = await sha256_of(content)
        counted = Counted(content)
        response = await self._optional("Writing files from a stream").call(
            "PUT",
            "/files/content",
            params=params,
            body=content.chunks if content.repeatable else counted.chunks,
            headers=headers,
            policy=None if content.repeatable else NO_RETRIES,
            timeout=_WRITTEN_LIMIT,
        )
        written = models.base.parse(models.FileContent, response.content)
        if not content.repeatable and written.sha256 != counted.sha256:
            raise SandboxException(f"{written.path} is not what was sent", hint="Send it again.")
        return written

    async def _put_the_rest(self, content: Content, size: int, params: list[tuple[str, str]]) -> models.FileContent:
        files, policy = self._optional("Uploads in parts"), self._execd.config.retry_policy
        digest = await sha256_of(content)
        failures, pause = 0, timedelta()
        arrived = await self._arrived(files, params[0])
        while True:
            offset = arrived if arrived <= size else 0
            headers = {**raw_headers(size - offset), "X-Checksum-SHA256": digest}
            part = [*params, ("offset", str(offset)), ("final", "true")]
            why: SandboxException
            try:
                response = await files.call(
                    "PUT", "/files/content", params=part, headers=headers, policy=NO_RETRIES, timeout=_WRITTEN_LIMIT,
                    body=lambda offset=offset: content.chunks(offset),  # type: ignore[misc]
                )  # fmt: skip
                return models.base.parse(models.FileContent, response.content)
            except (SandboxConnectionException, UnavailableException, ConflictException) as error:
                why, arrived = error, await self._arrived(files, params[0])
            except SandboxApiException as error:
                if error.code != Code.INVALID_FILE_CONTENT or not offset:
                    raise
                # What was there already is of something else.
                why, arrived = error, 0
            if arrived > offset:
                failures, pause = 0, timedelta()
                continue
            delay = policy.delay(failures, pause)
            if failures >= policy.max_retries or delay is None:
                raise why
            failures, pause = failures + 1, delay
            await sleep(pause)

    async def _arrived(self, files: Connection, path: tuple[str, str]) -> int:
        position = (await files.call("HEAD", "/files/content", params=[path])).headers.get(_ARRIVED, "")
        return int(position) if position.isdigit() else 0

    async def upload_tar(self, source: Local | IOBase | Pieces, path: str, *, owners: bool = False) -> models.TarResult:
        """Extract a tree below a directory, which is made if it is missing.

            sent = await sandbox.files.upload_tar("/usr/share/keyrings", "/tmp/tree")
            print(sent.entries, sent.bytes)

        `source` is a local directory; or an archive, plain or with gzip: its path, an open file, an iterator of bytes.
        Modes, times, links and empty directories are kept. With `owners` the files belong to whom the archive says, by
        number; otherwise to whoever writes them.
        """
        if isinstance(source, (str, os.PathLike)) and await in_thread(os.path.isdir, source):
            source = archive.packed(source)
        params = [("path", path), ("owners", "true" if owners else "false")]
        async with opened(source) as content:
            response = await self._optional("Trees as archives").call(
                "POST", "/files/tar", params=params, body=content.chunks, headers=raw_headers(content.size),
                timeout=_WRITTEN_LIMIT,
            )  # fmt: skip
        return models.base.parse(models.TarResult, response.content)

    async def read_tar(self, path: str, *, gzip: bool = False, chunk_size: int = 65536) -> ByteStream:
        """A directory, or a file, as an archive that comes in chunks. Read it to its end, or close it."""
        _expect_some(chunk_size)
        params = [("path", path), ("gzip", "true" if gzip else "false")]
        stack = AsyncExitStack()
        response = await stack.enter_async_context(
            self._optional("Trees as archives").stream(
                "GET", "/files/tar", params=params, headers={"Accept": "*/*"}, timeout=_WRITTEN_LIMIT
            )
        )
        return ByteStream(response.aiter_raw(chunk_size), stack, self._execd.base_url)

    async def download_tar(
        self, path: str, target: Local | IOBase, *, gzip: bool = False, max_bytes: int | None = _MOST_FETCHED
    ) -> None:
        """Fetch a directory, or a file, into a local directory; or as an archive into an open file.

            await sandbox.files.write_file("/tmp/tree/a.txt", "a")
            await sandbox.files.download_tar("/tmp/tree", "copy-of-tree")

        A local directory is made if it is missing; files that are there already are replaced. What programs in the
        sandbox prepared cannot leave it, and belongs to the user of this program: symbolic links that lead out, such as
        all absolute ones, are left out, and a warning in the log names them. `gzip` compresses on the way.

        More than `max_bytes`, holes in files included, is an error, by default 16 GiB; None is no limit.
        """
        async with await self.read_tar(path, gzip=gzip) as stream:
            if isinstance(target, (str, os.PathLike)):
                await pulled(stream, lambda pull: archive.unpack(pull, target, gzip=gzip, most=max_bytes))
                return
            written = 0
            async for chunk in stream:
                written += len(chunk)
                if max_bytes is not None and written > max_bytes:
                    raise archive.too_much(max_bytes)
                await in_thread(target.write, chunk)

    async def watch(self, path: str, *, recursive: bool = False) -> Watch[models.FileEvent]:
        """What happens in a directory, or to a file, from now on until it is closed.

            async with await sandbox.files.watch("/tmp") as changes:
                await sandbox.files.write_file("/tmp/news.txt", "x")
                async for change in changes:
                    print(change.type, change.path)
                    break

        `recursive` includes the directories below. An event of type `overflow` says that some were missed.
        """
        params = [("path", path), ("recursive", "true" if recursive else "false")]
        return await Watch.open(self._optional("Watching files"), "/files/watch", models.FileEvent, params)

    def _optional(self, what: str) -> Connection:
        return self._execd.below("", what)

    async def create_directories(self, entries: list[models.WriteEntry]) -> None:
        """Create directories, and those above them. The mode is that of a directory made by this call."""
        models.base.expect_each(entries, models.WriteEntry)
        body = {e.path: _permission(e) for e in entries}
        await self._execd.call("POST", "/directories", json=body)

    async def delete_files(self, paths: list[str]) -> None:
        """Delete files; those that do not exist are passed over."""
        await self._execd.call("DELETE", "/files", params=_paths(paths))

    async def delete_directories(self, paths: list[str]) -> None:
        """Delete directories with all that is in them; those that do not exist are passed over."""
        await self._execd.call("DELETE", "/directories", params=_paths(paths))

    async def move_files(self, entries: list[models.MoveEntry]) -> None:
        """Rename files or directories. An existing destination is an error."""
        models.base.expect_each(entries, models.MoveEntry)
        await self._execd.call("POST", "/files/mv", json=[{"src": e.src, "dest": e.dest} for e in entries])

    async def set_permissions(self, entries: list[models.SetPermissionEntry]) -> None:
        """Set mode, and owner and group where given."""
        models.base.expect_each(entries, models.SetPermissionEntry)
        body = {e.path: _permission(e) for e in entries}
        await self._execd.call("POST", "/files/permissions", json=body)

    async def replace_contents(self, entries: list[models.ContentReplaceEntry]) -> None:
        """Replace a text in files, everywhere it occurs."""
        await self._replace(entries, verbose=False)

    async def replace_contents_detailed(
        self, entries: list[models.ContentReplaceEntry]
    ) -> list[models.ContentReplaceResult]:
        """As `replace_contents`, and say how often."""
        counts = json.loads(await self._replace(entries, verbose=True))
        return [
            models.ContentReplaceResult(path=e.path, replaced_count=counts.get(e.path, {}).get("replacedCount", 0))
            for e in entries
        ]

    async def _replace(self, entries: list[models.ContentReplaceEntry], verbose: bool) -> bytes:
        models.base.expect_each(entries, models.ContentReplaceEntry)
        for entry in entries:
            if not entry.old_content:
                raise InvalidArgumentException(f"the text to replace in {entry.path} is empty")
        body = {e.path: {"old": e.old_content, "new": e.new_content} for e in entries}
        params = [("verbose", "true" if verbose else "false")]
        return (await self._execd.call("POST", "/files/replace", params=params, json=body)).content

    async def search(self, entry: models.SearchEntry) -> list[models.EntryInfo]:
        """Files below a directory whose base name matches a glob."""
        models.base.expect(entry, models.SearchEntry)
        params = [("path", entry.path), ("pattern", entry.pattern)]
        return models.base.parse(
            list[models.EntryInfo], (await self._execd.call("GET", "/files/search", params=params)).content
        )

    async def list_directory(self, entry: models.DirectoryListEntry) -> list[models.EntryInfo]:
        """The entries of a directory, each directory followed by its own as deep as asked for."""
        models.base.expect(entry, models.DirectoryListEntry)
        params = [("path", entry.path)]
        if entry.depth is not None:
            params.append(("depth", str(entry.depth)))
        return models.base.parse(
            list[models.EntryInfo], (await self._execd.call("GET", "/directories/list", params=params)).content
        )

    async def get_file_info(self, paths: list[str]) -> dict[str, models.EntryInfo]:
        """What is known about each path. One that does not exist makes the whole call fail."""
        return models.base.parse(
            dict[str, models.EntryInfo], (await self._execd.call("GET", "/files/info", params=_paths(paths))).content
        )


def _permission(entry: models.WriteEntry | models.SetPermissionEntry) -> dict[str, Any]:
    given = {"mode": entry.mode, "owner": entry.owner, "group": entry.group}
    return {name: value for name, value in given.items() if value is not None}


def _paths(paths: Sequence[str]) -> list[tuple[str, str]]:
    if isinstance(paths, str):
        raise InvalidArgumentException("paths is a list", hint=f"Write [{paths!r}].")
    return [("path", path) for path in paths]


def _expect_some(chunk_size: int) -> None:
    if type(chunk_size) is not int or chunk_size < 1:
        raise InvalidArgumentException("chunk_size is a number of bytes, at least 1", hint="Such as 65536.")


def _part_of(
    path: str, range_header: str | None, offset: int | None, limit: int | None
) -> tuple[list[tuple[str, str]], dict[str, str]]:
    params = [("path", path)]
    if offset is not None:
        params.append(("offset", str(offset)))
    if limit is not None:
        params.append(("limit", str(limit)))
    headers = {"Accept": "*/*"}
    if range_header is not None:
        headers["Range"] = range_header
    return params, headers
