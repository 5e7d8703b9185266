# SPDX-License-Identifier: Apache-2.0
"""What a create may ask for: the published request in, a `Wish` that can be granted out. Pure.

Three answers are possible to each field: it is honoured, it is refused with an error that names it, or it is accepted
without effect and a warning says so. There is no fourth.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from . import labels, limits
from .errors import Code, OpenSandboxError, invalid, unsupported_field, violation
from .sandbox import Limits
from .wire.lifecycle import CreateSandboxRequest

ECHOED_EXTENSIONS = "opensandbox.extensions."
ISOLATION = "bootstrap.execd.isolation"
"""Lets execd make isolated sessions."""

# execve refuses a single string longer than this, and so would the sandbox, later and less clearly.
_LONGEST_STRING = 128 * 1024 - 1
_LARGEST_ENVIRONMENT = 1024 * 1024

_ONE_SOURCE = "Exactly one of image or snapshotId must be provided."

_EGRESS = "OPENSANDBOX_EGRESS_"
_EGRESS_KEYS = frozenset(
    _EGRESS + name
    for name in (
        "LOG_LEVEL",
        "DNS_UPSTREAM_TIMEOUT",
        "MITMPROXY_SSL_INSECURE",
        "MITMPROXY_TRANSPARENT",
        "MITMPROXY_EXTRA_PORTS",
        "DENY_WEBHOOK",
        "METRICS_EXTRA_ATTRS",
        "CREDENTIAL_VAULT_REQUIRE_TLS",
        "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
        "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
        "POLICY_FILE",
    )
)


@dataclass(frozen=True)
class Rules:
    """What this server grants, whoever asks."""

    runtime: str
    """Its name, for refusals."""
    platform: dict[str, str]
    """`os` and `arch` of the machine."""
    max_timeout: int | None = None
    """Seconds; None: no limit."""


@dataclass(frozen=True)
class Wish:
    """A request that has been understood and can be granted."""

    image: str
    entrypoint: tuple[str, ...]
    env: dict[str, str]
    limits: Limits
    metadata: dict[str, str]
    extensions: dict[str, str]
    platform: dict[str, str] | None
    expires_at: datetime | None
    warnings: tuple[str, ...]


def validate(request: CreateSandboxRequest, rules: Rules, now: datetime) -> Wish:
    """Understand a create, or refuse it with the first thing that is wrong."""
    _check_shape(request)
    _refuse_what_nobody_does(request, rules)
    warnings: list[str] = [f"The unknown field {name[:64]!r} was ignored." for name in request.model_extra or ()]
    image = _image(request, warnings)
    labels.check(request.metadata or {})
    return Wish(
        image=image,
        entrypoint=_entrypoint(request),
        env=_env(request, warnings),
        limits=limits.parse(request.resource_limits or {}, rules.runtime),
        metadata=request.metadata or {},
        extensions=_extensions(request, rules, warnings),
        platform=_platform(request, rules),
        expires_at=_expiry(request, rules, now),
        warnings=tuple(warnings),
    )


def _check_shape(request: CreateSandboxRequest) -> None:
    """The published rules that span several fields; clients see 422 for these."""
    has_image = request.image is not None and bool(request.image.uri.strip())
    has_snapshot = bool((request.snapshot_id or "").strip())
    elsewhere = bool(request.template_id) or "poolRef" in (request.extensions or {})
    if has_image == has_snapshot and not (elsewhere and not has_image):
        raise violation(_ONE_SOURCE)
    if has_image and not request.entrypoint:
        raise violation("entrypoint is required when image is provided.")
    if request.credential_proxy and request.credential_proxy.enabled and request.network_policy is None:
        raise violation("credentialProxy requires networkPolicy.")
    if "OPENSANDBOX_LIFECYCLE" in (request.env or {}):
        raise violation("env key OPENSANDBOX_LIFECYCLE is reserved.", loc=("body", "env"))


def _refuse_what_nobody_does(request: CreateSandboxRequest, rules: Rules) -> None:
    # Becomes a question to the runtime as soon as one of them can do one of these.
    fields = {
        "templateId": request.template_id,
        "extensions.poolRef": "poolRef" in (request.extensions or {}),
        "networkPolicy": request.network_policy is not None,
        "credentialProxy": request.credential_proxy is not None and request.credential_proxy.enabled,
        "secureAccess": request.secure_access,
        "volumes": request.volumes,
        "lifecycle": request.lifecycle,
        "resourceRequests": request.resource_requests,
    }
    for field, asked in fields.items():
        if asked:
            raise unsupported_field(rules.runtime, field)
    if request.snapshot_id and request.snapshot_id.strip():
        raise OpenSandboxError(
            Code.SNAPSHOT_NOT_FOUND,
            f"There is no snapshot {request.snapshot_id[:64]}.",
            hint="Snapshots are not built yet; create the sandbox from an image.",
        )


def _image(request: CreateSandboxRequest, warnings: list[str]) -> str:
    if request.image is None:  # refused above; this tells the type checker
        raise violation(_ONE_SOURCE)
    uri = request.image.uri.strip()
    if len(uri) > 1024 or not uri.isprintable():
        raise invalid(
            "image.uri is not an image name.", hint="Use `host` or a name such as opensandbox/code-interpreter:latest."
        )
    if request.image.auth is not None:
        warnings.append("image.auth was not used: the image is built in and no registry is asked.")
    return uri


def _entrypoint(request: CreateSandboxRequest) -> tuple[str, ...]:
    words = tuple(request.entrypoint or ())
    if not words or not words[0].strip():
        raise OpenSandboxError(Code.SANDBOX_INVALID_ENTRYPOINT, "The first word of entrypoint is empty.")
    for word in words:
        if "\0" in word or _size(word) > _LONGEST_STRING:
            raise OpenSandboxError(
                Code.SANDBOX_INVALID_ENTRYPOINT, "A word of entrypoint holds a NUL byte or is longer than 128 KiB."
            )
    return words


def _env(request: CreateSandboxRequest, warnings: list[str]) -> dict[str, str]:
    env: dict[str, str] = {}
    for key, value in (request.env or {}).items():
        if not key or "=" in key or "\0" in key:
            raise invalid(f"The env key {key[:64]!r} is empty or holds '=' or a NUL byte.")
        if key.startswith(_EGRESS):
            if key not in _EGRESS_KEYS:
                raise invalid(f"The env key {key[:64]!r} is not one of the egress settings.")
            warnings.append(f"env {key} was dropped: without networkPolicy there is no egress to configure.")
            continue
        if value is None:
            continue
        if "\0" in value:
            raise invalid(f"The value of env {key[:64]!r} holds a NUL byte.")
        if _size(key) + _size(value) + 1 > _LONGEST_STRING:
            raise invalid(f"The value of env {key[:64]!r} is longer than 128 KiB.", hint="Upload a file instead.")
        env[key] = value
    if sum(_size(key) + _size(value) + 2 for key, value in env.items()) > _LARGEST_ENVIRONMENT:
        raise invalid("env is larger than 1 MiB in all.", hint="Upload a file instead.")
    return env


def _extensions(request: CreateSandboxRequest, rules: Rules, warnings: list[str]) -> dict[str, str]:
    kept: dict[str, str] = {}
    for key, value in (request.extensions or {}).items():
        if key.startswith(ECHOED_EXTENSIONS):
            kept[key] = value
        elif key == ISOLATION:
            if value != "enable":
                raise invalid(
                    f'extensions.{key} must be "enable".', hint="Leave it out for a sandbox without isolated runs."
                )
            kept[key] = value
        elif key == "access.renew.extend.seconds":
            if not (value.isascii() and value.isdigit() and len(value) <= 5 and 300 <= int(value) <= 86400):
                raise invalid(f"extensions.{key} must be a whole number of seconds from 300 to 86400.")
            raise unsupported_field(
                rules.runtime, f"extensions.{key}", hint="Renew the sandbox yourself with renew-expiration."
            )
        else:
            warnings.append(f"The unknown extension {key[:64]!r} was ignored.")
    return kept


def _platform(request: CreateSandboxRequest, rules: Rules) -> dict[str, str] | None:
    if request.platform is None:
        return None
    asked = {"os": request.platform.os.value, "arch": request.platform.arch.value}
    if asked != rules.platform:
        have = f"{rules.platform['os']}/{rules.platform['arch']}"
        raise unsupported_field(
            rules.runtime, f"platform {asked['os']}/{asked['arch']}", hint=f"This machine is {have}."
        )
    return asked


def _expiry(request: CreateSandboxRequest, rules: Rules, now: datetime) -> datetime | None:
    if request.timeout is None:
        return None
    if rules.max_timeout is not None and request.timeout > rules.max_timeout:
        raise invalid(f"timeout is longer than the {rules.max_timeout} seconds this server allows.")
    try:
        return now + timedelta(seconds=request.timeout)
    except OverflowError:
        raise invalid("timeout reaches beyond the end of the calendar.") from None


def _size(text: str) -> int:
    # Lone surrogates cannot come out of the JSON reader, but a runtime's caller may be a test.
    return len(text.encode("utf-8", "surrogatepass"))
