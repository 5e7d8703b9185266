# SPDX-License-Identifier: Apache-2.0
"""The values that go into the SDK's calls and come out of them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opensandbox.models import base as base
    from opensandbox.models.execd import (
        CommandEnd,
        CommandLogs,
        CommandStatus,
        Execution,
        ExecutionComplete,
        ExecutionError,
        ExecutionHandlers,
        ExecutionInit,
        ExecutionLogs,
        ExecutionResult,
        OutputMessage,
        RunCommandOpts,
    )
    from opensandbox.models.filesystem import (
        ContentReplaceEntry,
        ContentReplaceResult,
        DirectoryListEntry,
        EntryInfo,
        MoveEntry,
        SearchEntry,
        SetPermissionEntry,
        WriteEntry,
    )
    from opensandbox.models.sandboxes import (
        OSSFS,
        PVC,
        CredentialProxyConfig,
        Enforcement,
        Host,
        LifecycleHook,
        NetworkPolicy,
        NetworkRule,
        PagedSandboxInfos,
        PaginationInfo,
        PeriodicLifecycleHook,
        PlatformSpec,
        SandboxAllocation,
        SandboxCreateResponse,
        SandboxEnd,
        SandboxEndpoint,
        SandboxEndReason,
        SandboxFilter,
        SandboxImageAuth,
        SandboxImageSpec,
        SandboxInfo,
        SandboxIsolation,
        SandboxLifecycle,
        SandboxMetrics,
        SandboxRenewResponse,
        SandboxState,
        SandboxStatus,
        Volume,
    )
    from opensandbox.wire.execd import CommandEndReason

__all__ = [
    "OSSFS",
    "PVC",
    "CommandEnd",
    "CommandEndReason",
    "CommandLogs",
    "CommandStatus",
    "ContentReplaceEntry",
    "ContentReplaceResult",
    "CredentialProxyConfig",
    "DirectoryListEntry",
    "Enforcement",
    "EntryInfo",
    "Execution",
    "ExecutionComplete",
    "ExecutionError",
    "ExecutionHandlers",
    "ExecutionInit",
    "ExecutionLogs",
    "ExecutionResult",
    "Host",
    "LifecycleHook",
    "MoveEntry",
    "NetworkPolicy",
    "NetworkRule",
    "OutputMessage",
    "PagedSandboxInfos",
    "PaginationInfo",
    "PeriodicLifecycleHook",
    "PlatformSpec",
    "RunCommandOpts",
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
    "SandboxRenewResponse",
    "SandboxState",
    "SandboxStatus",
    "SearchEntry",
    "SetPermissionEntry",
    "Volume",
    "WriteEntry",
]

# Each noun's values are loaded when the first of them is asked for. Making the classes takes longer than creating a
# sandbox, and a program that lists sandboxes has no use for those about files.
_HOMES = {
    "models.execd": (
        "CommandEnd",
        "CommandLogs",
        "CommandStatus",
        "Execution",
        "ExecutionComplete",
        "ExecutionError",
        "ExecutionHandlers",
        "ExecutionInit",
        "ExecutionLogs",
        "ExecutionResult",
        "OutputMessage",
        "RunCommandOpts",
    ),
    "models.filesystem": (
        "ContentReplaceEntry",
        "ContentReplaceResult",
        "DirectoryListEntry",
        "EntryInfo",
        "MoveEntry",
        "SearchEntry",
        "SetPermissionEntry",
        "WriteEntry",
    ),
    "models.sandboxes": (
        "OSSFS",
        "PVC",
        "CredentialProxyConfig",
        "Enforcement",
        "Host",
        "LifecycleHook",
        "NetworkPolicy",
        "NetworkRule",
        "PagedSandboxInfos",
        "PaginationInfo",
        "PeriodicLifecycleHook",
        "PlatformSpec",
        "SandboxAllocation",
        "SandboxCreateResponse",
        "SandboxEnd",
        "SandboxEndpoint",
        "SandboxEndReason",
        "SandboxFilter",
        "SandboxImageAuth",
        "SandboxImageSpec",
        "SandboxInfo",
        "SandboxIsolation",
        "SandboxLifecycle",
        "SandboxMetrics",
        "SandboxRenewResponse",
        "SandboxState",
        "SandboxStatus",
        "Volume",
    ),
    "wire.execd": ("CommandEndReason",),
}
_HOME = {name: f"opensandbox.{home}" for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "base":
        return import_module("opensandbox.models.base")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
