# SPDX-License-Identifier: Apache-2.0
"""The local runtime's plan against golden files: a change of what sandboxd is asked shows up as a diff.

`UPDATE_GOLDEN=1 pytest server/tests/test_local_plan.py` writes them anew.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from opensandbox_server.ports import Address, LaunchSpec
from opensandbox_server.runtimes.local import plan
from opensandbox_server.sandbox import EndReason, Limits
from opensandbox_server.wire import sandboxd as wire

GOLDEN = Path(__file__).parent / "golden"

SMALLEST = LaunchSpec(
    id="6f1c9a52-0000-4000-8000-000000000001",
    image="host",
    entrypoint=("sleep", "infinity"),
    env={},
    limits=Limits(),
    generation=1,
    token_sha256="ab" * 32,
)
FULL = LaunchSpec(
    id="6f1c9a52-0000-4000-8000-000000000002",
    image="opensandbox/code-interpreter:v1.0.2",
    entrypoint=("/opt/opensandbox/code-interpreter.sh",),
    env={"PYTHON_VERSION": "3.11", "EMPTY": ""},
    limits=Limits(cpu_millis=500, memory_bytes=512 << 20, pids=64),
    generation=3,
    token_sha256="cd" * 32,
    deadline=datetime(2026, 11, 15, 18, 5, 34, 564247, tzinfo=UTC),
    request_id="req-1",
    isolates=True,
)
SETTINGS = plan.Settings(
    state_dir=Path("/var/lib/opensandbox"),
    run_dir=Path("/run/opensandbox/1f2e3d4c"),
    instance="1f2e3d4c" * 4,
    sandboxd=Path("/opt/bin/sandboxd"),
    ingress=Path("/opt/bin/ingress"),
)


def check(name: str, value: object) -> None:
    text = json.dumps(value, indent=2, sort_keys=True) + "\n"
    file = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize(("name", "spec"), [("smallest", SMALLEST), ("full", FULL)])
def test_launch_request(name: str, spec: LaunchSpec) -> None:
    asked = plan.launch_request(spec).model_dump(mode="json", by_alias=True, exclude_none=True)
    check(f"launch-{name}.json", asked)


def test_daemon_command() -> None:
    check("sandboxd-command.json", plan.daemon_command(SETTINGS))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("DEBUG", "debug"), ("INFO", "info"), ("WARNING", "warn"), ("ERROR", "error"), ("CRITICAL", "error")],
)
def test_the_node_logs_at_the_level_of_the_server(ours: str, theirs: str) -> None:
    command = plan.daemon_command(replace(SETTINGS, log_level=ours))
    assert command[command.index("--log-level") + 1] == theirs


def test_report_of_an_end() -> None:
    told = wire.Report.model_validate(
        {
            "id": SMALLEST.id,
            "state": "ended",
            "image": "host",
            "entrypoint": ["false"],
            "generation": 1,
            "protocol": 1,
            "createdAt": "2026-11-15T18:05:34Z",
            "acknowledged": False,
            "end": {"reason": "exited", "exitCode": 3, "at": "2026-11-15T18:05:35Z", "peakMemoryBytes": 4096},
        }
    )
    report = plan.report(told)
    assert not report.running
    assert report.end is not None
    assert (report.end.reason, report.end.exit_code, report.end.peak_memory_bytes) == (EndReason.EXITED, 3, 4096)
    assert (report.isolation, report.timings, report.warnings) == ({}, {}, ())


def test_every_reason_of_sandboxd_is_one_of_ours() -> None:
    assert {reason.value for reason in wire.NodeEndReason} == {reason.value for reason in EndReason}


def test_execd_has_its_own_socket_and_all_other_ports_share_one() -> None:
    base = f"/run/opensandbox/1f2e3d4c/{SMALLEST.id}"
    assert plan.address(SETTINGS, SMALLEST.id, 44772) == Address(f"{base}/api", "api")
    assert plan.address(SETTINGS, SMALLEST.id, 8000) == Address(f"{base}/ports", "ports")


def test_stages_are_told_in_the_order_they_happen() -> None:
    told = {"clone": 3.0, "cgroup": 2.0, "novelty": 9.0, "total": 8.0, "slot": 1.0}
    assert list(plan.in_order(told)) == ["slot", "cgroup", "clone", "total", "novelty"]
