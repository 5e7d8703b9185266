# SPDX-License-Identifier: Apache-2.0
"""Sandboxes, as values: what to create, what there is, how it ended."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Self

from pydantic import AliasChoices, ConfigDict, Field, field_validator, model_validator

from opensandbox.models.base import Answer, Asked, NotBlank, Value
from opensandbox.wire.lifecycle import EndReason as SandboxEndReason
from opensandbox.wire.lifecycle import Enforcement, SandboxState
from opensandbox.wire.lifecycle import Isolation as SandboxIsolation

if TYPE_CHECKING:
    from opensandbox.config import ConnectionSettings

__all__ = [
    "OSSFS",
    "PVC",
    "CreateSnapshotRequest",
    "CredentialProxyConfig",
    "Enforcement",
    "Host",
    "LifecycleHook",
    "NetworkPolicy",
    "NetworkPolicyStatus",
    "NetworkRule",
    "PagedSandboxInfos",
    "PagedSnapshotInfos",
    "PaginationInfo",
    "PeriodicLifecycleHook",
    "PlatformSpec",
    "SandboxAllocation",
    "SandboxCreateResponse",
    "SandboxEnd",
    "SandboxEndReason",
    "SandboxEndpoint",
    "SandboxFilter",
    "SandboxImageAuth",
    "SandboxImageSpec",
    "SandboxInfo",
    "SandboxIsolation",
    "SandboxLifecycle",
    "SandboxMetrics",
    "SandboxOrigin",
    "SandboxRenewResponse",
    "SandboxState",
    "SandboxStatus",
    "SnapshotFilter",
    "SnapshotInfo",
    "SnapshotStatus",
    "Volume",
]


# --- what to create ---------------------------------------------------------------------------------


class SandboxImageAuth(Value):
    """Credentials for a private image."""

    username: NotBlank
    password: NotBlank = Field(repr=False)


class SandboxImageSpec(Value):
    """An image by name, with credentials if it needs them: `SandboxImageSpec(image="host")`."""

    image: NotBlank = Field(validation_alias=AliasChoices("image", "uri"))
    auth: SandboxImageAuth | None = None

    def __init__(self, image: str | None = None, /, **fields: object) -> None:
        # The name alone may be given without its keyword.
        super().__init__(**({"image": image} if image is not None else {}), **fields)


class PlatformSpec(Value):
    """The platform an image is wanted for."""

    os: Literal["linux", "windows"]
    arch: Literal["amd64", "arm64"]


class NetworkRule(Value):
    """Allow or deny a name (`allowed.example`, `*.example.org`) or an address."""

    action: Literal["allow", "deny"]
    target: NotBlank


class NetworkPolicy(Value):
    """Which addresses a sandbox may reach; what no rule names follows `default_action`."""

    default_action: Literal["allow", "deny"] | None = Field(default="deny", alias="defaultAction")
    egress: list[NetworkRule] | None = None


class NetworkPolicyStatus(Answer):
    """The policy in force, as its enforcer tells it."""

    policy: NetworkPolicy


class CredentialProxyConfig(Asked):
    """Whether requests of the sandbox get credentials added on their way out."""

    enabled: bool = False


class Host(Asked):
    """A directory of the host."""

    path: str

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not (path.startswith("/") or path[1:3] == ":\\"):
            raise ValueError("the host path must be absolute")
        return path


class PVC(Asked):
    """A named volume, or a persistent volume claim in a cluster."""

    claim_name: NotBlank = Field(alias="claimName")
    create_if_not_exists: bool = Field(default=True, alias="createIfNotExists")
    delete_on_sandbox_termination: bool = Field(default=False, alias="deleteOnSandboxTermination")
    storage_class: str | None = Field(default=None, alias="storageClass")
    storage: str | None = None
    access_modes: list[str] | None = Field(default=None, alias="accessModes")


class OSSFS(Asked):
    """A bucket of an object store."""

    bucket: str
    endpoint: str
    version: Literal["1.0", "2.0"] = "2.0"
    options: list[str] | None = None
    access_key_id: str | None = Field(default=None, alias="accessKeyId")
    access_key_secret: str | None = Field(default=None, alias="accessKeySecret", repr=False)


class Volume(Asked):
    """Something mounted into a sandbox: exactly one of `host`, `pvc` and `ossfs`."""

    name: NotBlank
    host: Host | None = None
    pvc: PVC | None = None
    ossfs: OSSFS | None = None
    mount_path: str = Field(alias="mountPath", pattern="^/")
    read_only: bool = Field(default=False, alias="readOnly")
    sub_path: str | None = Field(default=None, alias="subPath")

    @model_validator(mode="after")
    def _one_backend(self) -> Self:
        if sum(backend is not None for backend in (self.host, self.pvc, self.ossfs)) != 1:
            raise ValueError("give exactly one of host, pvc and ossfs")
        return self


class LifecycleHook(Value):
    """A command at a moment of a sandbox's life."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] = Field(min_length=1)
    timeout_seconds: int | None = Field(default=None, alias="timeoutSeconds")


class PeriodicLifecycleHook(Value):
    """A command that runs again and again."""

    model_config = ConfigDict(extra="forbid")

    name: NotBlank
    schedule: NotBlank
    command: list[str] = Field(min_length=1)
    timeout_seconds: int | None = Field(default=None, alias="timeoutSeconds")


class SandboxLifecycle(Value):
    """Commands tied to a sandbox's life."""

    model_config = ConfigDict(extra="forbid")

    pre_start: LifecycleHook | None = Field(default=None, alias="preStart")
    periodic: list[PeriodicLifecycleHook] | None = None

    @field_validator("periodic")
    @classmethod
    def _unique(cls, hooks: list[PeriodicLifecycleHook] | None) -> list[PeriodicLifecycleHook] | None:
        if hooks and len({hook.name for hook in hooks}) != len(hooks):
            raise ValueError("names of periodic hooks must be unique")
        return hooks


# --- what there is ----------------------------------------------------------------------------------


class SandboxStatus(Answer):
    """Where a sandbox is in its life. `state` is one of `SandboxState`, or a newer one as plain text."""

    state: str
    reason: str | None = None
    message: str | None = None
    last_transition_at: datetime | None = None


class SandboxEnd(Answer):
    """How a sandbox's main process ended. `reason` is one of `SandboxEndReason`, or a newer one."""

    reason: str
    exit_code: int | None = None
    signal: str | None = None
    message: str | None = None
    at: datetime
    peak_memory_bytes: int | None = None


class SandboxAllocation(Answer):
    """Where a sandbox came from, if it came from a pool."""

    mode: Literal["pool"]
    pool_ref: str
    state: Literal["allocated"]


class SandboxInfo(Answer):
    """A sandbox as the server knows it."""

    id: str
    status: SandboxStatus
    entrypoint: list[str]
    expires_at: datetime | None = None
    created_at: datetime
    image: SandboxImageSpec | None = None
    snapshot_id: str | None = None
    platform: PlatformSpec | None = None
    allocation: SandboxAllocation | None = None
    metadata: dict[str, str] | None = None
    extensions: dict[str, str] | None = None
    end: SandboxEnd | None = None
    """Set once it has ended."""
    isolation: SandboxIsolation | None = None
    """What is really enforced, and by what means."""


class SandboxOrigin(StrEnum):
    """Where a sandbox came from."""

    TEMPLATE = "template"
    UNKNOWN = "unknown"


class SandboxEndpoint(Value):
    """Where a port of a sandbox is reached: an address without a scheme, and headers to send with it."""

    endpoint: str
    headers: dict[str, str] = Field(default_factory=dict, repr=False)
    origin: str | None = None
    warnings: list[str] = Field(default_factory=list)
    """What the server has to say about the address, such as that nobody reaches it from elsewhere."""

    def build_request_headers(self, connection_config: ConnectionSettings) -> dict[str, str]:
        """What to send along to this address; the API key only where the way leads through the server."""
        key = connection_config.get_api_key() if connection_config.use_server_proxy else None
        return {
            "User-Agent": connection_config.user_agent,
            **connection_config.headers,
            **({"OPEN-SANDBOX-API-KEY": key} if key else {}),
            **self.headers,
        }


class SandboxCreateResponse(SandboxInfo):
    """A sandbox just created, with what saves the next round trips."""

    timings: dict[str, float] = Field(default_factory=dict)
    endpoints: dict[str, SandboxEndpoint] = Field(default_factory=dict)
    warnings: list[str] = Field(default_factory=list)


class SandboxRenewResponse(Answer):
    """The new time at which the sandbox expires."""

    expires_at: datetime


class SandboxFilter(Asked):
    """Which sandboxes to list: any of `states`, all of `metadata`.

    `SandboxFilter(states=["Running"], metadata={"team": "red"}, page=1, page_size=50)`
    """

    states: list[str] | None = None
    metadata: dict[str, str] | None = None
    page_size: int | None = Field(default=None, gt=0)
    page: int | None = Field(default=None, ge=0)


class PaginationInfo(Answer):
    """Which page this is, and how many there are."""

    page: int
    page_size: int
    total_items: int
    total_pages: int
    has_next_page: bool


class PagedSandboxInfos(Answer):
    """A page of sandboxes, newest first."""

    sandbox_infos: list[SandboxInfo] = Field(validation_alias=AliasChoices("sandbox_infos", "items"))
    pagination: PaginationInfo


class SnapshotStatus(Answer):
    """How far a snapshot is: `Creating`, `Ready`, `Failed` or `Deleting`."""

    state: str
    reason: str | None = None
    message: str | None = None
    last_transition_at: datetime | None = None


class SnapshotInfo(Answer):
    """A file system that was kept, to create sandboxes from."""

    id: str
    sandbox_id: str
    name: str | None = None
    status: SnapshotStatus
    created_at: datetime


class CreateSnapshotRequest(Asked):
    """A name for a snapshot, if it should have one."""

    name: NotBlank | None = None


class SnapshotFilter(Asked):
    """Which snapshots to list: of that sandbox, with that name, in any of `states`."""

    sandbox_id: str | None = None
    name: str | None = None
    states: list[str] | None = None
    page_size: int | None = Field(default=None, gt=0)
    page: int | None = Field(default=None, ge=0)


class PagedSnapshotInfos(Answer):
    """A page of snapshots, newest first."""

    snapshot_infos: list[SnapshotInfo] = Field(validation_alias=AliasChoices("snapshot_infos", "items"))
    pagination: PaginationInfo


class SandboxMetrics(Value):
    """What a sandbox uses of what it may use."""

    cpu_count: float
    cpu_used_percentage: float = Field(validation_alias=AliasChoices("cpu_used_percentage", "cpu_used_pct"))
    memory_total_in_mib: float = Field(validation_alias=AliasChoices("memory_total_in_mib", "mem_total_mib"))
    memory_used_in_mib: float = Field(validation_alias=AliasChoices("memory_used_in_mib", "mem_used_mib"))
    timestamp: int
    """Milliseconds since 1970."""
    memory_peak_in_mib: float | None = Field(
        default=None, validation_alias=AliasChoices("memory_peak_in_mib", "mem_peak_mib")
    )
    disk_used_in_mib: float | None = Field(
        default=None, validation_alias=AliasChoices("disk_used_in_mib", "disk_used_mib")
    )
    """What the sandbox wrote to its root, where that can be told."""
    disk_total_in_mib: float | None = Field(
        default=None, validation_alias=AliasChoices("disk_total_in_mib", "disk_total_mib")
    )
    pids: int | None = None
    """Processes and threads."""
    pids_limit: int | None = None
    network_received_bytes: int | None = None
    network_sent_bytes: int | None = None
    oom_kills: int | None = None
    cpu_time_ms: int | None = None
