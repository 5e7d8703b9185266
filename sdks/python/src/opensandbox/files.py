# SPDX-License-Identifier: Apache-2.0
"""Files and directories of a sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from io import IOBase
from types import TracebackType
from typing import Any, Self

from opensandbox import models
from opensandbox.answers import translated
from opensandbox.exceptions import InvalidArgumentException
from opensandbox.multipart import Upload
from opensandbox.transport import Connection


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
