# SPDX-License-Identifier: Apache-2.0
"""The configuration: the published TOML file plus `[local]`, as frozen models, read once in `__main__`.

Three kinds of keys exist. Most are honoured. Some are published but mean nothing to this server (there is no execd
image to pull): they are accepted, and a note says so. Some ask for a promise this server cannot keep yet (a shared
database, a secure runtime): any value but their default is refused, because ignoring them would be a lie.

>>> loaded = load(Path("sandbox.toml"), environ={})     # doctest: +SKIP
>>> loaded.config.server.port                            # doctest: +SKIP
8080
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from .errors import CannotStart

ENVIRONMENT_FILE = "SANDBOX_CONFIG_PATH"
ENVIRONMENT_KEY = "OPENSANDBOX_SERVER_API_KEY"
ENVIRONMENT_STATE = "OPENSANDBOX_STATE_DIR"
ENVIRONMENT_INSECURE = "OPENSANDBOX_INSECURE_SERVER"
ENVIRONMENT_TENANTS = "SANDBOX_TENANTS_CONFIG_PATH"


@dataclass(frozen=True)
class Unused:
    """Marks a published key that is accepted and does nothing here; `why` is the note."""

    why: str


@dataclass(frozen=True)
class Unbuilt:
    """Marks a published key of which only the default can be honoured so far; `why` ends the refusal."""

    why: str


_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def _size(value: Any) -> Any:
    """`5GiB`, `512Mi`, `1g` or a number of bytes, as bytes. Single letters count in 1024, as memory limits do."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value.strip())
    if match is None:
        raise ValueError("write a size such as 512MiB or 2g, or a number of bytes")
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


Size = Annotated[int, BeforeValidator(_size)]


class _Part(BaseModel):
    """One section of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


_UVICORN = "the server always runs uvloop and httptools"


class Server(_Part):
    """Where the server listens, who may call, and where it keeps its state."""

    host: str = "localhost"
    """Address to listen on; localhost means both 127.0.0.1 and ::1."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port of the lifecycle API; 0 takes a free one."""
    api_key: SecretStr | None = None
    """Clients send it in the OPEN-SANDBOX-API-KEY header; required for any address but loopback."""
    eip: str | None = None
    """Host name or address that clients elsewhere reach this machine by; goes into endpoint answers."""
    max_sandbox_timeout_seconds: int | None = Field(default=None, ge=60)
    """Longest timeout a create may ask for; absent: no limit."""
    max_sandboxes: int | None = Field(default=None, ge=1)
    """Sandboxes there may be at once, of all tenants, ended ones not counted; absent: no limit. More get 429."""
    max_creating: int | None = Field(default=None, ge=1)
    """Sandboxes made at the same time; absent: twice the processors, at least 4. Further creates wait their turn."""
    max_waiting: int = Field(default=1000, ge=0)
    """Creates that may wait for their turn; more get 429 with the time to come back."""
    state_dir: Path | None = None
    """Directory of the database, the key and the sandboxes' files; root's default is /var/lib/opensandbox."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call this API from a browser; none unless named. `*` for all needs a key."""
    timeout_keep_alive: int = Field(default=30, ge=0)
    """Seconds an idle connection is kept."""
    limit_concurrency: int = Field(default=1024, ge=0)
    """Requests in flight before further ones get 503; 0 switches the limit off."""
    timeout_graceful_shutdown: int = Field(default=5, ge=0)
    """Seconds that requests in flight may take when the server stops."""
    backlog: int = Field(default=2048, ge=1)
    """Connections the kernel queues before they are accepted."""
    thread_pool_size: Annotated[int, Unused("no request of this server runs in a thread pool")] = 200
    """Published; this server has no thread pool to size."""
    loop: Annotated[str, Unused(_UVICORN)] = "auto"
    """Published; the event loop is uvloop."""
    http: Annotated[str, Unused(_UVICORN)] = "auto"
    """Published; the HTTP parser is httptools."""

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to bind, the one that must succeed first."""
        return ("127.0.0.1", "::1") if self.host == "localhost" else (self.host,)

    @property
    def loopback(self) -> bool:
        """True when only this machine can reach the API."""
        return all(_is_loopback(host) for host in self.hosts)


class Proxy(_Part):
    """How the server reaches sandboxes when a client asks it to forward."""

    page_sandbox: bool = True
    """Cut pages of sandboxes off from this server's origin; false lets them use an API without a key."""
    resolve_internal: Annotated[bool, Unused("sandboxes are reached by sockets, not by container addresses")] = True
    """Published; there is no internal address to prefer."""


_LOG_FILE = "the server logs to its standard error; redirect that instead"


class Log(_Part):
    """What the server says while it runs."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """Least serious message that is written; also by sandboxd and ingress, from their next start on."""
    format: Literal["json", "text"] | None = None
    """How it is written to standard error: `json` or `text`, one line each. Default: text on a terminal, else JSON."""
    file_enabled: Annotated[bool, Unused(_LOG_FILE)] = False
    """Published; there is no log file of its own."""
    file_path: Annotated[str | None, Unused(_LOG_FILE)] = None
    """Published; there is no log file of its own."""
    access_file_path: Annotated[str | None, Unused(_LOG_FILE)] = None
    """Published; there is no log file of its own."""
    file_max_bytes: Annotated[int, Unused(_LOG_FILE)] = 104857600
    """Published; there is no log file of its own."""
    file_backup_count: Annotated[int, Unused(_LOG_FILE)] = 5
    """Published; there is no log file of its own."""


class Runtime(_Part):
    """What makes the sandboxes."""

    type: Literal["local", "docker", "kubernetes"] = "local"
    """`local` makes them on this Linux machine, without Docker."""
    execd_image: Annotated[str | None, Unused("execd comes with the server, no image is pulled")] = None
    """Published; execd is part of the server's package."""
    execd_run_as_init: Annotated[bool, Unused("execd is always the first process of a local sandbox")] = False
    """Published; execd is always pid 1."""


class Local(_Part):
    """The local runtime (ours, not published)."""

    free_space_reserve: Size = Field(default=1024**3, ge=0)
    """Creates are refused when the state directory's disk has less than this free."""
    require_full_isolation: bool = False
    """Refuse to start where this host cannot enforce everything, instead of reporting what is missing."""
    ingress_port: int = Field(default=0, ge=0, le=65535)
    """Port that clients reach sandboxes through; 0 keeps the one used before, else 28888 or the next free one."""
    run_dir: Path | None = None
    """Directory of the sockets; its path must be short. Root's default is /run/opensandbox/<instance>."""


_DOCKER = "only the docker runtime reads it"


class Docker(_Part):
    """The docker runtime; nothing here matters to the local one."""

    network_mode: Annotated[str, Unused(_DOCKER)] = "host"
    """Docker network of the containers."""
    api_timeout: Annotated[int, Unused(_DOCKER)] = 180
    """Seconds to wait for the Docker API."""
    host_ip: Annotated[str | None, Unused(_DOCKER)] = None
    """Address of the host as containers see it."""
    drop_capabilities: Annotated[tuple[str, ...], Unused(_DOCKER)] = ()
    """Capabilities taken from containers."""
    apparmor_profile: Annotated[str | None, Unused(_DOCKER)] = None
    """AppArmor profile of containers."""
    no_new_privileges: Annotated[bool, Unused(_DOCKER)] = True
    """Whether containers may gain privileges; local sandboxes never may."""
    seccomp_profile: Annotated[str | None, Unused(_DOCKER)] = None
    """Seccomp profile of containers."""
    port_range_min: Annotated[int, Unused(_DOCKER)] = 40000
    """First port published for containers."""
    port_range_max: Annotated[int, Unused(_DOCKER)] = 60000
    """Last port published for containers."""
    publish_host: Annotated[str, Unused(_DOCKER)] = "0.0.0.0"  # noqa: S104 - the published default, never bound here
    """Address that container ports are published on."""
    pids_limit: Annotated[int | None, Unused(_DOCKER)] = 4096
    """Processes a container may have."""
    sandbox_env: Annotated[dict[str, str], Unused(_DOCKER)] = Field(default_factory=dict)
    """Environment added to every container."""
    sandbox_binds: Annotated[tuple[str, ...], Unused(_DOCKER)] = ()
    """Binds added to every container."""


_VOLUMES = "volumes are not built yet; a create that asks for one is refused"


class Storage(_Part):
    """Volumes."""

    allowed_host_paths: Annotated[tuple[str, ...], Unused(_VOLUMES)] = ()
    """Host directories that a sandbox may mount."""
    volume_default_size: Annotated[str, Unused(_VOLUMES)] = "1Gi"
    """Size of a volume that names none."""
    ossfs_mount_root: Annotated[str, Unused(_VOLUMES)] = "/mnt/ossfs"
    """Where object storage is mounted."""


_POSTGRES = "only SQLite is built so far; leave [store] type away"


class StorePostgresql(_Part):
    """A shared database."""

    dsn: Annotated[SecretStr | None, Unbuilt(_POSTGRES)] = None
    """Where the database is."""
    min_pool_size: Annotated[int, Unused(_POSTGRES)] = 1
    """Connections kept open."""
    max_pool_size: Annotated[int, Unused(_POSTGRES)] = 10
    """Connections at most."""
    connect_timeout_seconds: Annotated[float, Unused(_POSTGRES)] = 5
    """Seconds to wait for a connection to be made."""
    pool_timeout_seconds: Annotated[float, Unused(_POSTGRES)] = 5
    """Seconds to wait for a free connection."""
    snapshot_recovery_interval_seconds: Annotated[float, Unused(_POSTGRES)] = 15
    """Seconds between looks at unfinished snapshots."""


class Store(_Part):
    """The database."""

    type: Annotated[Literal["sqlite", "postgresql"], Unbuilt(_POSTGRES)] = "sqlite"
    """Which database."""
    path: Path | None = None
    """The SQLite file; absent: opensandbox.db in the state directory."""
    postgresql: StorePostgresql = StorePostgresql()
    """Settings of the shared database."""


_EGRESS = "sandboxes have no way out to the network yet"


class EgressUpstreamProxy(_Part):
    """A proxy that outgoing traffic would go through."""

    url: Annotated[str | None, Unused(_EGRESS)] = None
    """Address of the proxy."""
    authorization: Annotated[SecretStr | None, Unused(_EGRESS)] = None
    """What the proxy asks for."""
    ca_cert_path: Annotated[str | None, Unused(_EGRESS)] = None
    """Certificates the proxy is checked against."""
    ca_secret_name: Annotated[str | None, Unused(_EGRESS)] = None
    """Kubernetes secret of these certificates."""


class Egress(_Part):
    """The way out."""

    image: Annotated[str | None, Unused(_EGRESS)] = None
    """Image of the egress sidecar."""
    mode: Annotated[Literal["dns", "dns+nft"], Unused(_EGRESS)] = "dns"
    """How names are governed."""
    disable_ipv6: Annotated[bool, Unused(_EGRESS)] = True
    """Whether IPv6 is off inside."""
    otlp_endpoint: Annotated[str | None, Unused(_EGRESS)] = None
    """Where the sidecar sends its traces."""
    readiness_timeout_seconds: Annotated[float, Unused(_EGRESS)] = 30
    """Seconds to wait for the sidecar."""
    requests: Annotated[dict[str, str], Unused(_EGRESS)] = Field(default_factory=dict)
    """Resources the sidecar asks for."""
    limits: Annotated[dict[str, str], Unused(_EGRESS)] = Field(default_factory=dict)
    """Resources the sidecar may use."""
    upstream_proxy: EgressUpstreamProxy = EgressUpstreamProxy()
    """A proxy on the way out."""


_GATEWAY = "the local runtime brings its own ingress; leave it away"


class Ingress(_Part):
    """How clients reach sandboxes."""

    mode: Annotated[Literal["direct", "gateway"], Unbuilt(_GATEWAY)] = "direct"
    """direct: through the ingress of this server."""
    gateway: Annotated[dict[str, Any], Unbuilt(_GATEWAY)] = Field(default_factory=dict)
    """A gateway of your own in front."""
    secure_access: Annotated[dict[str, Any], Unbuilt("signed routes are not built yet; leave it away")] = Field(
        default_factory=dict
    )
    """Keys of signed routes."""


_RENEW = "renewal on access is not built yet; leave it away"


class RenewIntent(_Part):
    """Renewing a sandbox because it is used."""

    enabled: Annotated[bool, Unbuilt(_RENEW)] = False
    """Whether use extends a sandbox's life."""
    min_interval_seconds: Annotated[int, Unused(_RENEW)] = 60
    """Least time between two renewals."""
    redis: Annotated[dict[str, Any], Unbuilt(_RENEW)] = Field(default_factory=dict)
    """A queue of renewals from other machines."""


_SECURE = "no second engine is built yet; leave it away"


class SecureRuntime(_Part):
    """A stronger engine under the sandboxes."""

    type: Annotated[Literal["", "gvisor", "kata", "firecracker"], Unbuilt(_SECURE)] = ""
    """Which engine; empty: the local runtime's own."""
    docker_runtime: Annotated[str | None, Unused(_DOCKER)] = None
    """Name of the engine at Docker."""
    k8s_runtime_class: Annotated[str | None, Unused("only the kubernetes runtime reads it")] = None
    """Name of the engine at Kubernetes."""


_OTEL = "traces are not built yet; leave it away"


class Otel(_Part):
    """OpenTelemetry."""

    enabled: Annotated[bool, Unbuilt(_OTEL)] = False
    """Whether traces and metrics are sent."""
    endpoint: Annotated[str | None, Unused(_OTEL)] = None
    """Where they go."""
    service_name: Annotated[str | None, Unused(_OTEL)] = None
    """Under which name."""
    export_interval_millis: Annotated[int, Unused(_OTEL)] = 60000
    """How often metrics are sent."""


_HTTP_TENANTS = 'tenants from another server are not built yet; use provider = "file"'


class Tenants(_Part):
    """Several tenants on one server, each with keys of its own and seeing only its own sandboxes."""

    provider: Literal["file", "http"] | None = None
    """`file` reads ~/.opensandbox/tenants.toml (`[[tenants]]` with name, namespace and api_keys) and follows it."""
    endpoint: Annotated[str | None, Unused(_HTTP_TENANTS)] = None
    """Where the other server is."""
    max_stale_seconds: Annotated[int, Unused(_HTTP_TENANTS)] = 300
    """How long an answer of it may be used while it is away."""
    timeout_seconds: Annotated[float, Unused(_HTTP_TENANTS)] = 5
    """Seconds to wait for its answer."""
    auth_header: Annotated[str | None, Unused(_HTTP_TENANTS)] = None
    """Header that it asks for."""
    auth_token: Annotated[SecretStr | None, Unused(_HTTP_TENANTS)] = None
    """What goes into that header."""


class Config(_Part):
    """The whole file."""

    server: Server = Server()
    """Where the server listens, who may call, and where it keeps its state."""
    proxy: Proxy = Proxy()
    """How the server forwards to sandboxes."""
    log: Log = Log()
    """What the server says."""
    runtime: Runtime = Runtime()
    """What makes the sandboxes."""
    local: Local = Local()
    """The local runtime."""
    docker: Docker = Docker()
    """The docker runtime."""
    storage: Storage = Storage()
    """Volumes."""
    store: Store = Store()
    """The database."""
    egress: Egress = Egress()
    """The way out."""
    ingress: Ingress = Ingress()
    """How clients reach sandboxes."""
    renew_intent: RenewIntent = RenewIntent()
    """Renewing a sandbox because it is used."""
    secure_runtime: SecureRuntime = SecureRuntime()
    """A stronger engine under the sandboxes."""
    otel: Otel = Otel()
    """OpenTelemetry."""
    tenants: Tenants = Tenants()
    """Several tenants on one server."""
    kubernetes: Annotated[dict[str, Any], Unused("only the kubernetes runtime reads it")] = Field(default_factory=dict)
    """The kubernetes runtime."""
    agent_sandbox: Annotated[dict[str, Any], Unused("only the kubernetes runtime reads it")] = Field(
        default_factory=dict
    )
    """A workload provider of the kubernetes runtime."""


@dataclass(frozen=True)
class Loaded:
    """A configuration and where it came from."""

    config: Config
    file: Path | None
    """The file that was read; None when there was none."""
    notes: tuple[str, ...]
    """What was accepted and does nothing, one sentence each."""


def tenants_file(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    """Where the published server keeps its list of tenants."""
    named = environ.get(ENVIRONMENT_TENANTS)
    return Path(named).expanduser() if named else (home or Path.home()) / ".opensandbox" / "tenants.toml"


def load(
    named: Path | None,
    *,
    environ: Mapping[str, str] = os.environ,
    home: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Loaded:
    """Read the file named on the command line, by the environment, or in the home directory: the first there is.

    `overrides` are `[server]` keys from the command line; they win over the environment, which wins over the file.
    """
    file = _find(named, environ, home or Path.home())
    values = _parse(file) if file else {}
    server = values.setdefault("server", {})
    if isinstance(server, dict):
        for variable, key in ((ENVIRONMENT_KEY, "api_key"), (ENVIRONMENT_STATE, "state_dir")):
            if environ.get(variable):
                server[key] = environ[variable]
        server.update(overrides or {})
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise CannotStart(
            "\n".join(_describe(file, detail) for detail in error.errors(include_url=False)),
            "Correct the file; docs/configuration.md lists every key." if file else "",
        ) from None
    _refuse_unbuilt(config, file)
    _refuse_two_kinds_of_keys(config, file)
    _refuse_open_server(config, environ)
    _refuse_every_origin(config, file)
    return Loaded(config, file, tuple(_notes(config)))


def _find(named: Path | None, environ: Mapping[str, str], home: Path) -> Path | None:
    asked = [
        ("--config", named),
        (ENVIRONMENT_FILE, Path(environ[ENVIRONMENT_FILE]) if environ.get(ENVIRONMENT_FILE) else None),
    ]
    for source, path in asked:
        if path is not None:
            path = path.expanduser()
            if not path.is_file():
                raise CannotStart(
                    f"{source} names {path}, which is not a file.",
                    "Correct the path, or leave it away to use the defaults.",
                )
            return path
    found = home / ".sandbox.toml"
    return found if found.is_file() else None


def _parse(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotStart(f"{file} is not valid TOML: {error}.", "Correct the file.") from None
    except OSError as error:
        raise CannotStart(f"{file} cannot be read: {error.strerror}.", "Check its owner and mode.") from None


def _describe(file: Path | None, detail: Any) -> str:
    """One line for one error of pydantic, in the words of the file rather than of the model."""
    *sections, key = [str(part) for part in detail["loc"]]
    where = f"[{'.'.join(sections)}] {key}" if sections else f"[{key}]"
    prefix = _named(file)
    if detail["type"] == "extra_forbidden":
        nearest = _nearest(sections, key)
        return f"{prefix}{where} is not known{nearest}{'' if nearest.endswith('?') else '.'}"
    message = str(detail["msg"]).removeprefix("Value error, ")
    shown = "" if key in ("api_key", "dsn", "authorization", "auth_token") else f" (it is {detail['input']!r})"
    return f"{prefix}{where}: {message[0].lower()}{message[1:]}{shown}."


def _nearest(sections: list[str], key: str) -> str:
    model: type[BaseModel] = Config
    for section in sections:
        nested = model.model_fields[section].annotation
        if not (isinstance(nested, type) and issubclass(nested, BaseModel)):
            return ""
        model = nested
    close = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0] if sections else f'[{close[0]}]'}?"
    homes = [name for name, part in _sections() if key in part.model_fields and name not in sections]
    return f"; it belongs in [{homes[0]}]" if homes else ""


def _sections() -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in Config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield name, field.annotation


def _set_fields(part: BaseModel, where: str = "") -> Iterator[tuple[str, FieldInfo, Any]]:
    """Every key the file (or environment, or command line) gave, with its name as written there."""
    for name, field in type(part).model_fields.items():
        if name not in part.model_fields_set:
            continue
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _set_fields(value, f"{where}.{name}" if where else name)
        else:
            yield (f"[{where}] {name}" if where else f"[{name}]"), field, value


def _mark(field: FieldInfo, kind: type[Any]) -> Any:
    return next((mark for mark in field.metadata if isinstance(mark, kind)), None)


def _notes(config: Config) -> Iterator[str]:
    for name, field, _ in _set_fields(config):
        if mark := _mark(field, Unused):
            yield f"{name} has no effect: {mark.why}."


def _refuse_unbuilt(config: Config, file: Path | None) -> None:
    prefix = _named(file)
    if config.runtime.type != "local":
        built = [name for name in get_args(Runtime.model_fields["type"].annotation) if name == "local"]
        raise CannotStart(
            f'{prefix}[runtime] type = "{config.runtime.type}" is not built yet.',
            f'Use type = "{built[0]}", which needs no Docker and no cluster.',
        )
    for name, field, value in _set_fields(config):
        if (mark := _mark(field, Unbuilt)) and value != field.get_default(call_default_factory=True):
            raise CannotStart(f"{prefix}{name} cannot be honoured.", f"{mark.why[0].upper()}{mark.why[1:]}.")


def _refuse_two_kinds_of_keys(config: Config, file: Path | None) -> None:
    prefix = _named(file)
    provider = config.tenants.provider
    if provider is None and "tenants" in config.model_fields_set:
        raise CannotStart(f"{prefix}[tenants] names no provider.", 'Write provider = "file", or leave [tenants] away.')
    if provider == "http":
        raise CannotStart(f'{prefix}[tenants] provider = "http" cannot be honoured.', f"{_HTTP_TENANTS.capitalize()}.")
    if provider is not None and config.server.api_key is not None:
        raise CannotStart(
            f"{prefix}[server] api_key and [tenants] exclude each other: the key would belong to no tenant.",
            f"Leave api_key and {ENVIRONMENT_KEY} away, and give each tenant its keys in the file of tenants.",
        )


def _refuse_open_server(config: Config, environ: Mapping[str, str]) -> None:
    """Anyone who reaches a server without a key may run programs on this machine."""
    key = config.server.api_key
    if key is not None and not key.get_secret_value():
        raise CannotStart(
            "[server] api_key is empty.", "Give a key, or leave it away to listen on loopback without one."
        )
    if (
        config.server.loopback
        or key is not None
        or config.tenants.provider is not None
        or environ.get(ENVIRONMENT_INSECURE) == "YES"
    ):
        return
    raise CannotStart(
        f"Listening on {config.server.host} without an API key would let anyone who reaches it run programs here.",
        f"Set [server] api_key or {ENVIRONMENT_KEY}, or listen on localhost. On a network you trust, "
        f"{ENVIRONMENT_INSECURE}=YES overrides this.",
    )


def _refuse_every_origin(config: Config, file: Path | None) -> None:
    """Without a key only pages of named origins may call, so `*` would do nothing; and it must not do more."""
    server = config.server
    if "*" in server.cors_origins and server.api_key is None and config.tenants.provider is None:
        raise CannotStart(
            f'{_named(file)}[server] cors_origins = ["*"] cannot be honoured without a key: any page that a browser '
            "shows here could run programs on this machine.",
            f"Name the origins, such as http://localhost:3000, or set [server] api_key or {ENVIRONMENT_KEY}.",
        )


def _named(file: Path | None) -> str:
    return f"{file}: " if file else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
