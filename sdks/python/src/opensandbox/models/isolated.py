# SPDX-License-Identifier: Apache-2.0
"""Isolated sessions of a sandbox, as values."""

from __future__ import annotations

from datetime import datetime

from pydantic import Field

from opensandbox.models.base import Asked, NotBlank, Value


class IsolatedWorkspaceSpec(Value):
    """The directory that a session begins in."""

    path: NotBlank
    """Absolute, without symbolic links on the way."""
    mode: str | None = None
    """`rw`, `overlay` (changes are kept apart) or `ro`; None: `overlay` with the profile `strict`, else `rw`."""


class IsolatedOverlaySpec(Value):
    """A directory that a session sees in its own way."""

    path: NotBlank
    mode: str | None = None
    """As of a workspace; None: `overlay`."""
    persist: bool | None = None
    """Of an overlay; False: its changes are in neither `diff` nor `commit`."""


class BindMount(Value):
    """A directory or file that a session may write, or sees somewhere else."""

    source: NotBlank
    dest: str | None = None
    """None: where it is."""
    readonly: bool | None = None


class EnvPassthroughSpec(Value):
    """Which of the sandbox's variables a session gets: only (`allow`), or all but (`deny`), the keys."""

    mode: str = "deny"
    keys: list[str] = Field(default_factory=list)


class CreateIsolatedSessionRequest(Asked):
    """What a session is to be like. At least one of `workspace` and `overlays`."""

    workspace: IsolatedWorkspaceSpec | None = None
    overlays: list[IsolatedOverlaySpec] | None = None
    profile: str | None = None
    """`strict` (the default): overlay, a private /tmp, no network, no secrets in the environment. `balanced`: rw, the
    /tmp and the network of the sandbox."""
    extra_writable: list[str] | None = None
    binds: list[BindMount] | None = None
    share_net: bool | None = None
    env_passthrough: EnvPassthroughSpec | None = None
    uid: int | None = None
    gid: int | None = None
    uid_mode: str | None = None
    idle_timeout_seconds: int | None = None
    """The session ends so long after its last run; 0 or None: it does not."""


class IsolatedSessionInfo(Value):
    """A session, with what it was made of."""

    session_id: str
    created_at: datetime | None = None
    profile: str | None = None
    workspace: IsolatedWorkspaceSpec | None = None
    overlays: list[IsolatedOverlaySpec] | None = None
    extra_writable: list[str] | None = None
    binds: list[BindMount] | None = None
    share_net: bool | None = None
    env_passthrough: EnvPassthroughSpec | None = None
    uid: int | None = None
    gid: int | None = None
    uid_mode: str | None = None
    idle_timeout_seconds: int | None = None


class IsolatedSessionState(Value):
    """How a session is, with what it was made of."""

    status: str
    """`active`, `dead` (its processes were killed) or `destroyed` (it was idle for too long)."""
    created_at: datetime | None = None
    last_run_at: datetime | None = None
    idle_remaining_seconds: int | None = None
    """None: no limit."""
    profile: str | None = None
    workspace: IsolatedWorkspaceSpec | None = None
    overlays: list[IsolatedOverlaySpec] | None = None
    extra_writable: list[str] | None = None
    binds: list[BindMount] | None = None
    share_net: bool | None = None
    env_passthrough: EnvPassthroughSpec | None = None
    uid: int | None = None
    gid: int | None = None
    uid_mode: str | None = None
    idle_timeout_seconds: int | None = None


class IsolatedSessionSummary(Value):
    """A session in a list."""

    session_id: str
    status: str
    created_at: datetime
    last_run_at: datetime
    """Before its first run: when it was made."""
    idle_remaining_seconds: int | None = None


class IsolatedSessionList(Value):
    """The answer to a list of sessions."""

    sessions: list[IsolatedSessionSummary]


class IsolatedRunOpts(Asked):
    """How code is run."""

    envs: dict[str, str] | None = None
    """Exported into the shell before the code runs."""
    timeout_seconds: int | None = None
    """Of runs that are waited for."""


class IsolatedBackgroundRun(Value):
    """A run in the background."""

    session_id: str
    run_id: str
    started_at: datetime | None = None


class IsolatedRunStatus(Value):
    """How a run in the background goes."""

    session_id: str
    run_id: str
    running: bool
    exit_code: int | None = None
    error: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None


class IsolatedRunLogs(Value):
    """Output of a run in the background."""

    text: str
    cursor: int
    """The byte to go on with."""


class HardeningLayerState(Value):
    """Whether one layer protects."""

    state: str | None = None
    """`active`, `disabled`, `degraded` or `unsupported`."""
    message: str | None = None


class HardeningStatus(Value):
    """What protects the sandbox from a session's code."""

    init_mode: str | None = None
    signal_shield: bool = False
    cap_drop: HardeningLayerState | None = None
    seccomp: HardeningLayerState | None = None
    landlock: HardeningLayerState | None = None
    ebpf: HardeningLayerState | None = None


class IsolatedCapabilities(Value):
    """What a sandbox can do of this."""

    available: bool = False
    isolator: str | None = None
    version: str | None = None
    message: str | None = None
    """Why it is not available."""
    setpriv_available: bool = False
    userns_available: bool = False
    commit_supported: bool = False
    diff_supported: bool = False
    hardening: HardeningStatus | None = None


class IsolatedChange(Value):
    """What a session changed in an overlay."""

    path: str
    change: str
    """`created`, `modified` or `deleted`."""
    type: str
    """`file`, `directory`, `symlink` or `other`."""
    size: int | None = None


class IsolatedDiff(Value):
    """All that a session changed in its overlays."""

    changes: list[IsolatedChange]
    truncated: bool = False
    """There are more; `diff_tar` has all."""


class IsolatedCommit(Value):
    """How many changes a commit made."""

    created: int
    modified: int
    deleted: int
    skipped: list[str] = Field(default_factory=list)
    """What cannot be carried over, such as sockets."""
