# SPDX-License-Identifier: Apache-2.0
"""What is sent to the lifecycle API: bodies, query strings, paths. Pure."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

from opensandbox import models
from opensandbox.exceptions import InvalidArgumentException

DEFAULT_ENTRYPOINT = ["tail", "-f", "/dev/null"]
DEFAULT_RESOURCE = {"cpu": "1", "memory": "2Gi"}

Query = list[tuple[str, str]]


def segment(identity: str, what: str) -> str:
    """An id as one step of a path."""
    if not isinstance(identity, str):
        raise InvalidArgumentException(f"the {what} id is a text, not {type(identity).__name__}")
    if not identity:
        raise InvalidArgumentException(
            f"the {what} id is empty", hint="Give the id that the call which made it has returned."
        )
    return quote(identity, safe="")


def sandbox_path(sandbox_id: str) -> str:
    """Where a sandbox is below the API."""
    return f"/sandboxes/{segment(sandbox_id, 'sandbox')}"


def create_request(
    *,
    image: models.SandboxImageSpec | str | None = None,
    snapshot_id: str | None = None,
    template_id: str | None = None,
    timeout: timedelta | None = None,
    env: dict[str, str] | None = None,
    metadata: dict[str, str] | None = None,
    resource: dict[str, str] | None = None,
    resource_requests: dict[str, str] | None = None,
    platform: models.PlatformSpec | None = None,
    network_policy: models.NetworkPolicy | None = None,
    credential_proxy: models.CredentialProxyConfig | None = None,
    extensions: dict[str, str] | None = None,
    secure_access: bool = False,
    entrypoint: list[str] | None = None,
    volumes: list[models.Volume] | None = None,
    lifecycle: models.SandboxLifecycle | None = None,
) -> dict[str, Any]:
    """The body that creates a sandbox, with the defaults of the SDK. A template brings most of it itself."""
    dump = models.base.dump
    if volumes:
        models.base.expect_each(volumes, models.Volume)
    if template_id is None:
        resource = DEFAULT_RESOURCE if resource is None else resource
        entrypoint = entrypoint or (DEFAULT_ENTRYPOINT if snapshot_id is None else None)
    wanted = {
        "image": _image(image),
        "snapshotId": snapshot_id,
        "templateId": template_id,
        "timeout": _lifetime(timeout),
        "env": env,
        "metadata": metadata,
        "resourceLimits": resource,
        "resourceRequests": resource_requests,
        "platform": dump(platform, models.PlatformSpec),
        "networkPolicy": dump(network_policy, models.NetworkPolicy),
        "credentialProxy": dump(credential_proxy, models.CredentialProxyConfig),
        "extensions": extensions,
        "secureAccess": secure_access,
        "entrypoint": entrypoint,
        "volumes": [dump(volume, models.Volume) for volume in volumes] if volumes else None,
        "lifecycle": dump(lifecycle, models.SandboxLifecycle),
    }
    return {name: value for name, value in wanted.items() if value is not None}


def _image(image: models.SandboxImageSpec | str | None) -> dict[str, Any] | None:
    if image is None:
        return None
    if isinstance(image, str):
        spec = models.base.of_arguments(models.SandboxImageSpec, 'Name an image, such as "host".', image=image)
    elif isinstance(image, models.SandboxImageSpec):
        spec = image
    else:
        raise InvalidArgumentException(
            f"image is a text or a SandboxImageSpec, not {type(image).__name__}",
            hint='Write image="host", or SandboxImageSpec("host", auth=...) for a private image.',
        )
    return {"uri": spec.image, **({"auth": models.base.dump(spec.auth, models.base.Value)} if spec.auth else {})}


def seconds_of(span: timedelta, name: str) -> float:
    """How long that is; `name` is the argument it was given as. A plain number is refused: of what unit?"""
    if not isinstance(span, timedelta):
        number = span if isinstance(span, (int, float)) and not isinstance(span, bool) else 600
        raise InvalidArgumentException(
            f"{name} is a timedelta, not {type(span).__name__}",
            hint=f"Write {name}=timedelta(seconds={number}), with `from datetime import timedelta`.",
        )
    return span.total_seconds()


def _lifetime(timeout: timedelta | None) -> int | None:
    if timeout is None:
        return None
    seconds = int(seconds_of(timeout, "timeout"))
    if seconds < 60:
        raise InvalidArgumentException("timeout is at least 60 seconds", hint="Call kill() to end a sandbox sooner.")
    return seconds


def renew_request(timeout: timedelta) -> dict[str, Any]:
    """The body that lets a sandbox expire that long from now."""
    if seconds_of(timeout, "timeout") <= 0:
        raise InvalidArgumentException("the time to renew for must be positive")
    return {"expiresAt": (datetime.now(UTC) + timeout).isoformat()}


def sandbox_query(wanted: models.SandboxFilter) -> Query:
    """The filter of a list of sandboxes."""
    states = [("state", state) for state in wanted.states or ()]
    return [*states, *_metadata(wanted.metadata), *page_query(wanted.page, wanted.page_size)]


def snapshot_query(wanted: models.SnapshotFilter) -> Query:
    """The filter of a list of snapshots."""
    given = [("sandboxId", wanted.sandbox_id), ("name", wanted.name)]
    query = [(name, value) for name, value in given if value is not None]
    query += [("state", state) for state in wanted.states or ()]
    return [*query, *page_query(wanted.page, wanted.page_size)]


def template_query(wanted: models.TemplateFilter) -> Query:
    """The filter of a list of templates."""
    return [*_metadata(wanted.metadata), *page_query(wanted.page, wanted.page_size)]


def history_query(wanted: models.HistoryFilter) -> Query:
    """The filter of a list of sandboxes that are gone."""
    reasons = [("reason", reason) for reason in wanted.reasons or ()]
    return [*_metadata(wanted.metadata), *reasons, *page_query(wanted.page, wanted.page_size)]


def page_query(page: int | None, page_size: int | None) -> Query:
    """Which page of a list."""
    given = [("page", page), ("pageSize", page_size)]
    return [(name, str(number)) for name, number in given if number is not None]


def _metadata(wanted: dict[str, str] | None) -> Query:
    if not wanted:
        return []
    # Quoted here and once more with the query string, as the protocol has it.
    pairs = (f"{quote(key, safe='')}={quote(value, safe='')}" for key, value in wanted.items())
    return [("metadata", "&".join(pairs))]


def why_unusable(created: models.SandboxCreateResponse) -> str | None:
    """Why a sandbox that was just created cannot be used: its entry point ended at once. None if it can."""
    if created.status.state not in ("Terminated", "Failed"):
        return None
    end = created.end
    how = f"{end.reason}" if end else created.status.reason or created.status.state
    if end and end.exit_code is not None:
        how += f" with code {end.exit_code}"
    said = (end and end.message) or created.status.message
    return f"the entry point {created.entrypoint} ended at once: {how}" + (f" ({said})" if said else "")
