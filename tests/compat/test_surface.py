# SPDX-License-Identifier: Apache-2.0
"""The public surface of the SDK, call by call: ours has all of the published one, and the two worlds are alike."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("signatures.py")

SERVICES = [
    "Commands", "Diagnostics", "Egress", "Filesystem", "Health", "IsolationService", "IsolationSession", "Metrics",
]  # fmt: skip
CLASSES = [
    "opensandbox:Sandbox",
    "opensandbox:SandboxManager",
    "opensandbox.sandbox:Sandbox",
    "opensandbox.manager:SandboxManager",
    "opensandbox.config:ConnectionConfig",
    *(f"opensandbox.services:{name}" for name in SERVICES),
    "code_interpreter:CodeInterpreter",
    "code_interpreter.services:Codes",
]
SYNC_CLASSES = [
    "opensandbox:SandboxSync",
    "opensandbox:SandboxManagerSync",
    "opensandbox.sync:SandboxSync",
    "opensandbox.sync:SandboxManagerSync",
    "opensandbox.sync.sandbox:SandboxSync",
    "opensandbox.sync.manager:SandboxManagerSync",
    "opensandbox.config:ConnectionConfigSync",
    *(f"opensandbox.sync.services:{name}Sync" for name in SERVICES),
    "code_interpreter:CodeInterpreterSync",
    "code_interpreter.sync.services:CodesSync",
]
MODELS = [
    *(
        f"opensandbox.models.sandboxes:{name}"
        for name in (
            "SandboxImageAuth", "SandboxImageSpec", "PlatformSpec", "NetworkRule", "NetworkPolicy", "Host", "PVC",
            "OSSFS", "CredentialProxyConfig", "LifecycleHook", "PeriodicLifecycleHook", "SandboxLifecycle", "Volume",
            "SandboxStatus", "SandboxAllocation", "SnapshotStatus", "SnapshotInfo", "SandboxInfo",
            "SandboxCreateResponse", "CreateSnapshotRequest", "SandboxRenewResponse", "SandboxEndpoint",
            "PaginationInfo", "PagedSandboxInfos", "PagedSnapshotInfos", "SandboxFilter", "SnapshotFilter",
            "SandboxMetrics",
        )
    ),
    *(
        f"opensandbox.models.templates:{name}"
        for name in (
            "TemplateReadiness", "TemplateStatus", "CreateTemplateRequest", "TemplateInfo", "TemplateFilter",
            "PagedTemplateInfos",
        )
    ),
    *(
        f"opensandbox.models.filesystem:{name}"
        for name in (
            "EntryInfo", "WriteEntry", "DirectoryListEntry", "MoveEntry", "SetPermissionEntry", "ContentReplaceEntry",
            "ContentReplaceResult", "SearchEntry",
        )
    ),
    *(
        f"opensandbox.models.execd:{name}"
        for name in (
            "OutputMessage", "ExecutionResult", "ExecutionError", "ExecutionLogs", "ExecutionComplete", "ExecutionInit",
            "Execution", "ExecutionHandlers", "RunCommandOpts", "CommandStatus", "CommandLogs",
        )
    ),
    *(
        f"opensandbox.models.isolated:{name}"
        for name in (
            "BindMount", "CreateIsolatedSessionRequest", "EnvPassthroughSpec", "HardeningLayerState", "HardeningStatus",
            "IsolatedBackgroundRun", "IsolatedCapabilities", "IsolatedOverlaySpec", "IsolatedRunLogs",
            "IsolatedRunOpts", "IsolatedRunStatus", "IsolatedSessionInfo", "IsolatedSessionState",
            "IsolatedSessionSummary", "IsolatedWorkspaceSpec",
        )
    ),
    "opensandbox.models.execd_sync:ExecutionHandlersSync",
    "opensandbox.models.diagnostics:DiagnosticContent",
]  # fmt: skip

NOT_YET = {
    "credential_vault": "the credential vault is not built yet",
}
VAULT = dict.fromkeys(
    ["create", "get", "patch", "delete", "list_credentials", "get_credential", "list_bindings", "get_binding"],
    NOT_YET["credential_vault"],
)
POOL = dict.fromkeys(
    ["with_transport_if_missing", "new_owned_transport", "close_transport_if_owned", "owns_transport"],
    "connections are shared by equal configurations, so a configuration owns none",
)
# Members of the published classes that ours do without, each with the reason.
WITHOUT: dict[str, dict[str, str]] = {
    "Sandbox": NOT_YET,
    "Egress": VAULT,
    "ConnectionConfig": POOL,
}
# What differs between the two worlds by its nature.
TWINS = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__", "aclose": "close"}


@cache
def surfaces(python: str) -> dict[str, Any]:
    places = [*CLASSES, *SYNC_CLASSES, *MODELS]
    done = subprocess.run([python, str(SCRIPT), *places], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def missing(theirs: dict[str, Any], ours: dict[str, Any], without: dict[str, str]) -> list[str]:
    """What a program written for the one cannot do with the other."""
    found = []
    for name, wanted in theirs["members"].items():
        if name in without:
            continue
        have = ours["members"].get(name)
        if have is None or (wanted == "property") != (have == "property"):
            found.append(f"{name}: {'missing' if have is None else 'of another kind'}")
        elif wanted != "property" and name not in ("__exit__", "__aexit__"):  # what these get is given by position
            found += [f"{name}({problem})" for problem in _calls(wanted, have)]
    for name, required in theirs["fields"].items():
        if name not in ours["fields"]:
            found.append(f"{name}: no such field")
        elif ours["fields"][name] and not required:
            found.append(f"{name}: required here")
    return found


def _calls(wanted: list[list[Any]], have: list[list[Any]]) -> list[str]:
    ours = {name: (required, keyword_only) for name, required, keyword_only in have}
    problems = []
    for name, required, keyword_only in wanted:
        if name.startswith("__"):
            continue  # given by position
        if name not in ours:
            problems.append(f"{name}: missing")
        elif ours[name][0] and not required:
            problems.append(f"{name}: required here")
        elif ours[name][1] and not keyword_only:
            problems.append(f"{name}: only by keyword here")
    problems += [f"{name}: required, but unknown there" for name, required, _ in have
                 if required and name not in {one[0] for one in wanted} and not _given_by_position(wanted)]  # fmt: skip
    by_position = [name for name, _, keyword_only in wanted if not keyword_only and not name.startswith(("exc_", "__"))]
    order = [name for name, _, keyword_only in have if not keyword_only]
    if by_position != order[: len(by_position)]:
        problems.append(f"in the order {order}")
    return problems


def _given_by_position(wanted: list[list[Any]]) -> bool:
    return any(name.startswith(("exc_", "__")) for name, *_ in wanted)


@pytest.mark.parametrize("place", [*CLASSES, *SYNC_CLASSES, *MODELS])
def test_everything_published_is_there(published: Path, place: str) -> None:
    theirs, ours = surfaces(str(published / "python"))[place], surfaces(sys.executable)[place]
    without = WITHOUT.get(place.partition(":")[2].removesuffix("Sync"), {})
    assert missing(theirs, ours, without) == []
    there = {*theirs["members"], *theirs["fields"]}
    here = {*ours["members"], *ours["fields"]}
    assert [name for name in without if name in here or name not in there] == [], "an exception that is none"


@pytest.mark.parametrize(("place", "twin"), list(zip(CLASSES, [*SYNC_CLASSES[:2], *SYNC_CLASSES[4:]], strict=True)))
def test_both_worlds_are_alike(place: str, twin: str) -> None:
    ours = surfaces(sys.executable)
    members = {TWINS.get(name, name): value for name, value in ours[place]["members"].items()}
    assert members == ours[twin]["members"]
    assert ours[place]["fields"] == ours[twin]["fields"]


def test_what_is_missing_is_found() -> None:
    theirs = {"members": {"a": [["x", True, False]], "b": "property"}, "fields": {"f": False}}
    ours = {"members": {"a": [["y", True, False]]}, "fields": {"f": True}}
    assert missing(theirs, ours, {}) == [
        "a(x: missing)",
        "a(y: required, but unknown there)",
        "a(in the order ['y'])",
        "b: missing",
        "f: required here",
    ]
