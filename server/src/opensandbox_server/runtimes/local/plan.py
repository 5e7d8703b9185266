# SPDX-License-Identifier: Apache-2.0
"""What to ask of sandboxd, and what its answers mean. Pure: no I/O, so a golden file can hold every case."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from opensandbox_server import ports
from opensandbox_server.sandbox import End, EndReason
from opensandbox_server.wire import sandboxd as wire

PROTOCOL = 1
"""The node API this server speaks; it also speaks the one before."""


@dataclass(frozen=True)
class Settings:
    """Where the local runtime keeps things and what it lets sandboxd do."""

    state_dir: Path
    run_dir: Path
    instance: str
    sandboxd: Path
    """The daemon's binary."""
    ingress: Path
    """The ingress binary, started by sandboxd."""
    pip_dir: Path | None = None
    """pip for sandboxes of machines whose Python has none."""
    free_space_reserve: int = 1024**3
    require_full_isolation: bool = False
    ingress_hosts: tuple[str, ...] = ("127.0.0.1", "::1")
    ingress_port: int = 0
    public_host: str = "127.0.0.1"
    """What clients put before the ingress port."""
    log_level: str = "INFO"
    """Of sandboxd and ingress, in the words of `[log] level`."""

    @property
    def socket(self) -> Path:
        """Where sandboxd listens."""
        return self.run_dir / "sandboxd.sock"


def launch_request(spec: ports.LaunchSpec) -> wire.LaunchRequest:
    """The closed request: names and numbers, nothing that sandboxd would have to trust.

    >>> launch_request(spec).profile        # doctest: +SKIP
    <LaunchRequestProfile.STRICT: 'strict'>
    """
    limits = wire.Limits(**{name: value for name, value in vars(spec.limits).items() if value is not None})
    return wire.LaunchRequest(
        id=spec.id,
        image=spec.image,
        entrypoint=list(spec.entrypoint),
        env=spec.env or None,
        limits=limits if limits.model_fields_set else None,
        profile=wire.LaunchRequestProfile.ISOLATED if spec.isolates else wire.LaunchRequestProfile.STRICT,
        token_sha256=spec.token_sha256,
        generation=spec.generation,
        deadline=spec.deadline,
        request_id=spec.request_id,
    )


_LEVELS = {"WARNING": "warn", "CRITICAL": "error"}
"""Where the node's words differ."""


def daemon_command(settings: Settings) -> list[str]:
    """How sandboxd is started; it outlives the server, so everything it needs is said here."""
    command = [
        str(settings.sandboxd),
        "--state-dir",
        str(settings.state_dir),
        "--run-dir",
        str(settings.run_dir),
        "--free-space-reserve",
        str(settings.free_space_reserve),
        "--ingress",
        str(settings.ingress),
        "--log-level",
        _LEVELS.get(settings.log_level, settings.log_level.lower()),
    ]
    if settings.pip_dir is not None:
        command += ["--pip-dir", str(settings.pip_dir)]
    return command


def ingress_request(settings: Settings) -> wire.IngressRequest:
    """Where clients shall reach sandboxes."""
    return wire.IngressRequest(hosts=list(settings.ingress_hosts), port=settings.ingress_port or None)


def report(told: wire.Report) -> ports.Report:
    """What sandboxd says about one sandbox, in the words of the port."""
    return ports.Report(
        id=told.id,
        generation=told.generation,
        running=told.state is wire.ReportState.RUNNING,
        end=end(told.end) if told.end else None,
        image=told.image,
        isolation=told.isolation or {},
        timings=in_order(told.timings or {}),
        warnings=tuple(told.warnings or ()),
        acknowledged=told.acknowledged,
    )


STAGES = ("slot", "cgroup", "clone", "root", "enter", "pooled", "ready", "total")
"""How sandboxd makes a sandbox, step by step; a JSON object it sends has no order of its own."""


def in_order(timings: Mapping[str, float]) -> dict[str, float]:
    """Stages as they follow each other; one of a newer sandboxd goes last."""
    return {
        stage: timings[stage]
        for stage in sorted(timings, key=lambda s: (STAGES.index(s) if s in STAGES else len(STAGES), s))
    }


def end(told: wire.NodeEnd) -> End:
    """How it ended."""
    return End(
        reason=EndReason(told.reason.value),
        at=told.at,
        exit_code=told.exit_code,
        signal=told.signal,
        message=told.message,
        peak_memory_bytes=told.peak_memory_bytes,
    )


def remains(told: wire.Remains) -> ports.Remains:
    """What is left of a sandbox, in the words of the port. A text that is no base64 is no text."""
    return ports.Remains(
        end=end(told.end) if told.end else None, output=_bytes(told.output), journal=_bytes(told.journal)
    )


def _bytes(text: bytes | None) -> bytes:
    try:
        return base64.b64decode(text or b"", validate=True)
    except ValueError:
        return b""


def description(name: str, version: wire.NodeVersion, host: wire.Host) -> ports.Description:
    """This runtime and its machine."""
    return ports.Description(
        name=name,
        version=version.version,
        abilities=dict.fromkeys(ports.ABILITIES, False),  # none of them is built here yet
        images=tuple({"name": image.name, "description": image.description} for image in host.images),
        host={
            "kernel": host.kernel,
            "cgroup": host.cgroup.value,
            "rootless": host.rootless,
            "freeBytes": host.free_bytes,
            "reserveBytes": host.reserve_bytes,
        },
        missing=tuple(host.missing),
    )


def address(settings: Settings, sandbox_id: str, port: int) -> ports.Address:
    """execd's own port is the `api` socket, any other goes through `ports`."""
    kind = "api" if port == 44772 else "ports"
    return ports.Address(socket=str(settings.run_dir / sandbox_id / kind), kind=kind)


def image_list(images: Sequence[wire.ImageInfo]) -> str:
    """What is there, for the error that says what is not."""
    return "; ".join(f"{image.name} ({image.description})" for image in images)
