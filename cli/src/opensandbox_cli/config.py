# SPDX-License-Identifier: Apache-2.0
"""Settings: from the command line, else the environment, else a file, else defaults."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from opensandbox_cli import duration
from opensandbox_cli.failure import Failure, usage

# How long a sandbox lives unless somebody says otherwise.
DEFAULT_LIFETIME = "10m"

TEMPLATE = """\
# Settings of osb. What is given on the command line or in the environment wins over this file.

[connection]
# api_key = "your-api-key"
# domain = "localhost:8080"
# protocol = "http"
# request_timeout = 30          # seconds
# use_server_proxy = false      # reach sandboxes through the server

[output]
# color = true

[defaults]
# image = "host"
# timeout = "10m"               # or "none": sandboxes stay until they are killed
"""


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("is a text")
    return value


def _protocol(value: object) -> str:
    if value not in ("http", "https"):
        raise ValueError("is http or https")
    return str(value)


def _flag(value: object) -> bool:
    if isinstance(value, str):
        value = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False}.get(
            value.lower(), False if value.lower() == "off" else value
        )
    if not isinstance(value, bool):
        raise ValueError("is true or false")
    return value


def _seconds(value: object) -> int | float:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError("is a number of seconds")
    seconds = duration.parse(str(value)).total_seconds()
    if seconds <= 0:
        raise ValueError("is more than zero seconds")
    return int(seconds) if seconds.is_integer() else seconds


def _lifetime(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError('is a duration such as "10m", or "none"')
    duration.parse_or_none(str(value))
    return str(value)


@dataclass(frozen=True)
class Key:
    """A setting: where it is written, and what it may be."""

    section: str
    name: str
    check: Callable[[object], Any]
    default: Any = None
    variable: str | None = None
    shown_as: str = ""
    """Its name in `config show`, as published."""
    unset: str | None = None
    """What applies when it is not set, for people."""

    @property
    def path(self) -> str:
        """As in `osb config set PATH VALUE`."""
        return f"{self.section}.{self.name}"


KEYS = [
    Key("connection", "api_key", _text, None, "OPEN_SANDBOX_API_KEY", "api_key"),
    Key("connection", "domain", _text, "localhost:8080", "OPEN_SANDBOX_DOMAIN", "domain"),
    Key("connection", "protocol", _protocol, "http", "OPEN_SANDBOX_PROTOCOL", "protocol"),
    Key("connection", "request_timeout", _seconds, 30, "OPEN_SANDBOX_REQUEST_TIMEOUT", "request_timeout"),
    Key("connection", "use_server_proxy", _flag, False, "OPEN_SANDBOX_USE_SERVER_PROXY", "use_server_proxy"),
    Key("output", "color", _flag, True, None, "color"),
    Key("defaults", "image", _text, None, None, "default_image"),
    Key("defaults", "timeout", _lifetime, None, None, "default_timeout", DEFAULT_LIFETIME),
]
_BY_PATH = {key.path: key for key in KEYS}


def default_path() -> Path:
    """Where the file is, unless --config names another."""
    return Path.home() / ".opensandbox" / "config.toml"


@dataclass(frozen=True)
class Settings:
    """Every setting with its value, and where that comes from."""

    file: Path
    values: Mapping[str, Any]
    sources: Mapping[str, str]
    warnings: tuple[str, ...] = ()

    def __getitem__(self, path: str) -> Any:
        return self.values[path]

    @property
    def server(self) -> str:
        """The address of the server, for people."""
        domain = str(self["connection.domain"]).rstrip("/")
        return domain if "://" in domain else f"{self['connection.protocol']}://{domain}"

    @property
    def request_timeout(self) -> timedelta:
        """How long to wait for an answer."""
        return timedelta(seconds=self["connection.request_timeout"])


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None) -> Settings:
    """Put the four sources together. `flags` are by path; those not given are None."""
    path = file or default_path()
    if file is not None and not file.exists():
        raise usage(f"there is no configuration file {file}", f"`osb --config {file} config init` makes one.")
    written, warnings = read(path)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key in KEYS:
        given: tuple[object, str]
        if flags.get(key.path) is not None:
            given = flags[key.path], "command line"
        elif key.variable and environment.get(key.variable):
            given = environment[key.variable], key.variable
        elif key.path in written:
            given = written[key.path], str(path)
        else:
            values[key.path], sources[key.path] = key.default, "default"
            continue
        values[key.path], sources[key.path] = _checked(key, *given), given[1]
    return Settings(path, values, sources, tuple(warnings))


def _checked(key: Key, value: object, source: str) -> Any:
    try:
        return key.check(value)
    except ValueError as error:
        # The value may be a key: it is not repeated.
        raise usage(f"{source}: {key.path} {error}") from None


def read(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The settings in a file by path, and what is to be said about the file."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, []
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise usage(f"{path} is not TOML: {error}") from None
    found: dict[str, Any] = {}
    warnings: list[str] = []
    for section, content in document.items():
        if not isinstance(content, dict):
            warnings.append(f"{path}: {section} stands outside of a section and is ignored{_nearest(section)}")
            continue
        for name, value in content.items():
            if f"{section}.{name}" in _BY_PATH:
                found[f"{section}.{name}"] = value
            else:
                warnings.append(f"{path}: {section}.{name} is not known and ignored{_nearest(f'{section}.{name}')}")
    return found, warnings


def _nearest(path: str) -> str:
    names = {key.name: key.path for key in KEYS}
    close = difflib.get_close_matches(path, _BY_PATH, 1, 0.6) or difflib.get_close_matches(
        path.rpartition(".")[2], names, 1, 0.75
    )
    return f"; did you mean {names.get(close[0], close[0])}?" if close else ""


def initialise(path: Path, force: bool) -> None:
    """Write a file with every setting as a comment."""
    if path.exists() and not force:
        raise Failure(f"{path} exists already", "--force overwrites it.")
    _write(path, TEMPLATE)


def store(path: Path, name: str, value: str) -> Any:
    """Set one setting in the file, leaving its comments alone; the value as it is stored."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    key = _BY_PATH.get(name)
    if key is None:
        raise usage(f"there is no setting {name}{_nearest(name)}", f"There are: {', '.join(_BY_PATH)}.")
    checked = _checked(key, value, "not set")
    try:
        document = tomlkit.parse(path.read_text(encoding="utf-8") if path.exists() else TEMPLATE)
    except (TOMLKitError, UnicodeDecodeError) as error:
        raise usage(f"{path} is not TOML: {error}") from None
    if key.section not in document:
        document[key.section] = tomlkit.table()
    section: Any = document[key.section]
    section[key.name] = checked
    _write(path, tomlkit.dumps(document))
    return checked


def _write(path: Path, text: str) -> None:
    """Replace the file; nobody else may read it, because it holds a key."""
    if path.is_symlink():
        path = path.resolve()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def masked(secret: str | None) -> str | None:
    """Enough of a secret to recognise it, and no more."""
    if secret is None:
        return None
    return f"{secret[:2]}{'*' * 8}{secret[-2:]}" if len(secret) >= 12 else "*" * 8
