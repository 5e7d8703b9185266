# SPDX-License-Identifier: Apache-2.0
"""What the published SDK can ask for and this platform does not have yet: each call is refused, and says so clearly."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any

import recording
from checks import check, raises, run
from sdk import Sandbox, SandboxManager, config
from world import opened

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.sandboxes import NetworkRule, SnapshotFilter
from opensandbox.models.templates import CreateTemplateRequest, TemplateFilter


async def refused(label: str, call: Awaitable[object], statuses: tuple[int, ...] = (400, 404, 501)) -> None:
    """With a status that tells a program not to try again, a code and a sentence."""
    error = await raises(SandboxApiException, call)
    assert error.status_code in statuses, (label, error.status_code, error)
    code, message = error.error.code, error.error.message
    if code == "UNEXPECTED_RESPONSE":
        # A status that this call of 1.1.1 does not know: then it hands over the answer as it came.
        told = json.loads(error.response_body)
        code, message = told["code"], told["message"]
        assert code in str(error), (label, str(error))
    assert code, (label, error)
    assert message, (label, error)
    recording.CALLS.append((label, f"refused: {error.status_code} {code}", ""))


async def each(prefix: str, calls: dict[str, Callable[[], Awaitable[object]]]) -> None:
    problems = []
    for name, call in calls.items():
        try:
            await refused(f"{prefix}.{name}", call())
        except Exception as error:
            problems.append(f"{prefix}.{name}: {type(error).__name__}: {error}")
    assert not problems, "\n".join(problems)


@check
async def snapshots(sandbox: Any) -> None:
    await refused("Sandbox.create_snapshot", sandbox.create_snapshot("name"))
    manager = await SandboxManager.create(config())
    await each(
        "SandboxManager",
        {
            "create_snapshot": lambda: manager.create_snapshot(sandbox.id, "name"),
            "get_snapshot": lambda: manager.get_snapshot("x"),
            "list_snapshots": lambda: manager.list_snapshots(SnapshotFilter()),
            "delete_snapshot": lambda: manager.delete_snapshot("x"),
        },
    )
    await manager.close()


@check
async def templates(sandbox: Any) -> None:
    manager = await SandboxManager.create(config())
    asked = Sandbox.create_from_template("tpl_x", timeout=timedelta(minutes=5), connection_config=config())
    await refused("Sandbox.create_from_template", asked)
    await each(
        "SandboxManager",
        {
            "create_template": lambda: manager.create_template(CreateTemplateRequest(image="host", publish="s3://b/p")),
            "get_template": lambda: manager.get_template("x"),
            "list_templates": lambda: manager.list_templates(TemplateFilter()),
            "delete_template": lambda: manager.delete_template("x"),
        },
    )
    await manager.close()


@check
async def pause_and_resume(sandbox: Any) -> None:
    manager = await SandboxManager.create(config())
    await refused("Sandbox.pause", sandbox.pause())
    await refused("Sandbox.resume", Sandbox.resume(sandbox.id, config()))
    await refused("SandboxManager.pause_sandbox", manager.pause_sandbox(sandbox.id))
    await refused("SandboxManager.resume_sandbox", manager.resume_sandbox(sandbox.id))
    await manager.close()


@check
async def signed_endpoints(sandbox: Any) -> None:
    await refused("Sandbox.get_signed_endpoint", sandbox.get_signed_endpoint(8000, 4_000_000_000))


@check
async def egress(sandbox: Any) -> None:
    rule = NetworkRule(action="allow", target="allowed.example")
    await each(
        "Sandbox",
        {
            "get_egress_policy": lambda: sandbox.get_egress_policy(),
            "patch_egress_rules": lambda: sandbox.patch_egress_rules([rule]),
            "delete_egress_rules": lambda: sandbox.delete_egress_rules(["allowed.example"]),
        },
    )


@check
async def credential_vault(sandbox: Any) -> None:
    vault = sandbox.credential_vault
    await each(
        "CredentialVault",
        {
            "create": lambda: vault.create(credentials=[], bindings=[]),
            "get": lambda: vault.get(),
            "patch": lambda: vault.patch(),
            "delete": lambda: vault.delete(),
            "list_credentials": lambda: vault.list_credentials(),
            "get_credential": lambda: vault.get_credential("x"),
            "list_bindings": lambda: vault.list_bindings(),
            "get_binding": lambda: vault.get_binding("x"),
        },
    )


run(opened)
