# SPDX-License-Identifier: Apache-2.0
"""Tenants from a file: which key belongs to whom. The file is read at start and again whenever it changes.

    [[tenants]]
    name = "team-a"
    namespace = "team-a"
    api_keys = ["a long random string"]

A tenant sees its own sandboxes and nothing of the others. Sandboxes made before there were tenants belong to the one
named `default`, if there is one. `namespace` is for runtimes that have namespaces; this one keeps it unused.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from .errors import CannotStart

log = logging.getLogger(__name__)

LOOK_EVERY = 2.0
_LARGEST_FILE = 4 * 1024 * 1024
_LONGEST_NAME = 253
_NOBODY = bytes(hashlib.sha256().digest_size)
_KNOWN = frozenset({"name", "namespace", "api_keys"})


@dataclass(frozen=True)
class Directory:
    """Keys to tenants, as one reading of the file gave them. Keys are held as digests only."""

    by_digest: dict[bytes, tuple[bytes, str]] = field(repr=False)

    def tenant(self, key: bytes) -> str | None:
        """Whose key that is. How long it takes tells nothing about any key: it looks up a digest of its own making."""
        digest = hashlib.sha256(key).digest()
        known, name = self.by_digest.get(digest, (_NOBODY, ""))
        return name if hmac.compare_digest(known, digest) else None


class BadTenants(Exception):
    """The file cannot be used; the text says why, without a key in it."""


def parse(text: str) -> Directory:
    """Read the whole file or refuse it: half a list of tenants would lock people out.

    >>> parse('[[tenants]]\\nname = "a"\\napi_keys = ["k"]').tenant(b"k")
    'a'
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadTenants(f"it is not valid TOML: {error}") from None
    entries = content.get("tenants")
    if set(content) != {"tenants"} or not isinstance(entries, list) or not entries:
        raise BadTenants("it must hold one or more [[tenants]] and nothing else")
    names: set[str] = set()
    by_digest: dict[bytes, tuple[bytes, str]] = {}
    for number, entry in enumerate(entries, 1):
        name, keys = _entry(number, entry)
        if name in names:
            raise BadTenants(f"two tenants have the name {name!r}")
        names.add(name)
        for key in keys:
            digest = hashlib.sha256(key.encode()).digest()
            _, owner = by_digest.setdefault(digest, (digest, name))
            if owner != name:
                raise BadTenants(f"{owner!r} and {name!r} have the same key")
    return Directory(by_digest)


def _entry(number: int, entry: Any) -> tuple[str, list[str]]:
    if not isinstance(entry, dict):
        raise BadTenants(f"tenant {number} is not a table")
    if unknown := sorted(set(entry) - _KNOWN):
        raise BadTenants(f"tenant {number} has the unknown key {unknown[0][:64]!r}")
    name, keys = entry.get("name"), entry.get("api_keys")
    if not isinstance(name, str) or not name or len(name) > _LONGEST_NAME or not name.isprintable():
        raise BadTenants(f"tenant {number} needs a name: printable, at most {_LONGEST_NAME} characters")
    if not isinstance(entry.get("namespace", ""), str):
        raise BadTenants(f"the namespace of {name!r} is not a text")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) and _is_key(key) for key in keys):
        raise BadTenants(f"{name!r} needs api_keys: a list of texts without spaces, at least one")
    return name, keys


def _is_key(key: str) -> bool:
    # Anything else could not be sent in a header.
    return 0 < len(key) <= 1024 and key.isascii() and key.isprintable() and " " not in key


class Tenants:
    """The list as it is now. A file that becomes bad changes nothing but the log.

    >>> tenants = Tenants(path)                             # doctest: +SKIP
    >>> tenants.tenant(b"a key"), tenants.tenant(b"no key") # doctest: +SKIP
    ('team-a', None)
    """

    def __init__(self, path: Path) -> None:
        """Raises `CannotStart` when the file is not there or cannot be used."""
        self._path = path
        self._seen = _stamp(path)
        try:
            self._directory = parse(_read(path))
        except BadTenants as error:
            raise CannotStart(
                f"The list of tenants {path} cannot be used: {error}.",
                "Write [[tenants]] with name and api_keys, or leave [tenants] out of the configuration.",
            ) from None

    def tenant(self, key: bytes) -> str | None:
        """Whose key that is; None: nobody's."""
        return self._directory.tenant(key)

    async def run(self) -> None:
        """Until cancelled: look whether the file has changed."""
        while True:
            await anyio.sleep(LOOK_EVERY)
            await self.look()

    async def look(self) -> None:
        """Read the file again if it is another one than before."""
        await to_thread.run_sync(self._look)

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._directory = parse(_read(self._path))
        except BadTenants as error:
            log.error("the list of tenants %s cannot be used, the old one stays: %s", self._path, error)
        else:
            log.info("the list of tenants %s was read again", self._path)


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise BadTenants(f"{error.strerror}") from None
    if len(content) > _LARGEST_FILE:
        raise BadTenants("it is larger than 4 MiB")
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise BadTenants("it is not UTF-8") from None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
