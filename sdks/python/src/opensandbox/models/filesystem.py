# SPDX-License-Identifier: Apache-2.0
"""Files and directories of a sandbox, as values.

Modes are octal digits written as a plain number, in both directions: `644` is rw-r--r--.
"""

from __future__ import annotations

from datetime import datetime
from io import IOBase

from pydantic import ConfigDict, Field

from opensandbox.models.base import Asked, Mode, NotBlank, Value


class EntryInfo(Value):
    """What is known about a file, directory or symbolic link (the link itself, not its target)."""

    path: str
    entry_type: str | None = Field(default=None, alias="type")
    """`file`, `directory`, `symlink` or `other`."""
    mode: int
    owner: str
    group: str
    size: int
    modified_at: datetime
    created_at: datetime


class WriteEntry(Asked):
    """A file to write, or a directory to create (then without data).

    `WriteEntry(path="/tmp/a.txt", data="hello", mode=644)`
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    path: NotBlank
    data: str | bytes | IOBase | None = None
    """Text, bytes, or an open file, which is streamed and not read into memory as a whole."""
    mode: Mode = 755
    owner: str | None = None
    group: str | None = None
    encoding: NotBlank = "utf-8"


class MoveEntry(Asked):
    """A rename: `MoveEntry(src="/a", dest="/b")`, or with `source` and `destination`."""

    src: NotBlank = Field(alias="source")
    dest: NotBlank = Field(alias="destination")


class SetPermissionEntry(Asked):
    """Mode and, if given, owner and group for a path."""

    path: NotBlank
    owner: str | None = None
    group: str | None = None
    mode: Mode = 755


class ContentReplaceEntry(Asked):
    """Replace every occurrence of a text in a file."""

    path: NotBlank
    old_content: str
    new_content: str


class ContentReplaceResult(Value):
    """How often the text was replaced in a file."""

    path: str
    replaced_count: int


class SearchEntry(Asked):
    """Files below `path` whose base name matches the glob `pattern` (`*`, `**`, `?`, `[..]`, `{a,b}`)."""

    path: NotBlank
    pattern: NotBlank


class DirectoryListEntry(Asked):
    """A directory to list; `depth` 1 is its direct entries."""

    path: NotBlank
    depth: int | None = Field(default=None, ge=0)


class FileContent(Value):
    """A file that was written."""

    path: str
    size: int
    sha256: str


class TarResult(Value):
    """An archive that was extracted."""

    path: str
    entries: int
    bytes: int
    """In files."""


class FileEvent(Value):
    """Something that happened to a file or directory.

    `type` is `create`, `modify`, `delete`, `move`, `attrib`, or `overflow`: then events were lost, and the tree is to
    be looked at again.
    """

    type: str
    path: str
    to: str | None = None
    """Where it was moved."""
    kind: str
    """`file` or `directory`."""
    message: str | None = None
