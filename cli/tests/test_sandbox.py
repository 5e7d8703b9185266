# SPDX-License-Identifier: Apache-2.0
"""`osb sandbox`, `version`, diagnostics, and how errors are told."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import OSB, Osb
from live_server import LiveServer


def answer(osb: Osb, *arguments: str) -> Any:
    return json.loads(osb(*arguments, "-o", "json").stdout)


def test_a_life(osb: Osb, server: LiveServer) -> None:
    made = answer(osb, "sandbox", "create", "-i", "host", "-t", "1h30m", "-m", "team=red", "-e", "A=b")
    assert made == {"id": made["id"], "status": "created", "timeout": "1:30:00", "image": "host"}
    sandbox = made["id"]
    listed = answer(osb, "sandbox", "list", "-m", "team=red", "-s", "Running")
    assert [item["id"] for item in listed["items"]] == [sandbox]
    assert listed["pagination"]["total_items"] == 1
    info = answer(osb, "sandbox", "get", sandbox)
    assert info["metadata"] == {"team": "red"}
    assert info["status"]["state"] == "Running"
    assert yaml.safe_load(osb("sandbox", "get", sandbox, "-o", "yaml").stdout)["id"] == sandbox
    assert osb("command", "run", sandbox, "--", "echo $A").stdout == b"b\n"
    renewed = answer(osb, "sandbox", "renew", sandbox, "-t", "2h")
    assert renewed["expires_at"] > info["expires_at"]
    assert answer(osb, "sandbox", "endpoint", sandbox, "-p", "8000")["endpoint"].endswith(f"{sandbox}/8000")
    assert answer(osb, "sandbox", "health", sandbox) == {"sandbox_id": sandbox, "healthy": True}
    assert answer(osb, "sandbox", "metrics", sandbox)["cpu_count"] > 0
    assert "created" in osb("diagnostics", "events", sandbox).stdout.decode()
    assert answer(osb, "diagnostics", "logs", sandbox)["kind"] == "logs"
    assert sandbox in osb("devops", "summary", sandbox).stdout.decode()
    assert answer(osb, "sandbox", "kill", sandbox) == [{"sandbox_id": sandbox, "status": "terminated"}]
    assert sandbox not in server.ids()


def test_a_request_from_a_file(osb: Osb, server: LiveServer, tmp_path: Path) -> None:
    request = {"image": {"uri": "host"}, "entrypoint": ["sleep", "1000"], "resourceLimits": {}, "timeout": 600}
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    made = osb("sandbox", "create", "-f", str(file), "-q").stdout.decode().strip()
    assert server.get(made)["entrypoint"] == ["sleep", "1000"]
    piped = osb("sandbox", "create", "-f", "-", "-q", stdin=file.read_bytes()).stdout.decode().strip()
    assert osb("sandbox", "kill", made, piped).stdout.count(b"terminated") == 2
    assert b"whole request" in osb("sandbox", "create", "-f", str(file), "-i", "host", code=2).stderr
    file.write_text("[1")
    assert b"is not JSON" in osb("sandbox", "create", "-f", str(file), code=2).stderr


def test_an_entry_point_that_cannot_start_leaves_nothing(osb: Osb, server: LiveServer) -> None:
    before = server.ids()
    assert b"/nosuch" in osb("sandbox", "create", "-i", "host", "--entrypoint", "/nosuch", code=1).stderr
    assert server.ids() == before


def test_killing_goes_on_after_one_that_is_not_there(osb: Osb, server: LiveServer) -> None:
    sandbox = server.create().id
    done = osb("sandbox", "kill", "nope", sandbox, code=1)
    assert sandbox in done.stdout.decode()
    assert "error: nope: There is no sandbox nope." in done.stderr.decode()
    assert sandbox not in server.ids()


def test_a_table_in_a_pipe_is_plain_and_complete(osb: Osb, sandbox_id: str) -> None:
    lines = osb("sandbox", "list", COLUMNS="20").stdout.decode().splitlines()
    assert lines[0].split() == ["ID", "STATUS", "IMAGE", "CREATED", "EXPIRES"]
    (line,) = [line for line in lines if line.startswith(sandbox_id)]
    assert line.split()[1:3] == ["Running", "host"]
    assert line.split()[4] == "ago"
    assert "\x1b" not in "".join(lines)
    assert sandbox_id in osb("sandbox", "list", "-q").stdout.decode().splitlines()


def test_a_table_on_a_terminal_has_colours_and_whole_ids(
    osb: Osb, sandbox_id: str, terminal: Callable[..., tuple[int, str]], environment: dict[str, str]
) -> None:
    code, drawn = terminal("sandbox", "list")
    assert code == 0
    assert sandbox_id in drawn
    assert "\x1b[32mRunning" in drawn
    for off in (["--no-color"], []):
        environment |= {} if off else {"NO_COLOR": "1"}
        assert "\x1b[32m" not in terminal(*off, "sandbox", "list")[1]


def test_a_reader_that_leaves_is_no_error(start: Callable[..., subprocess.Popen[bytes]], sandbox_id: str) -> None:
    process = start("sandbox", "get", sandbox_id, "-o", "json")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before anything was written
    assert process.stderr.read() == b""
    assert process.wait() == 141


def test_pausing_shows_the_servers_refusal(osb: Osb, sandbox_id: str) -> None:
    for verb in ("pause", "resume"):
        said = osb("sandbox", verb, sandbox_id, code=1).stderr.decode().splitlines()
        assert said[0].startswith("error: ")
        assert "API_NOT_SUPPORTED" in said[-1]


def test_an_error_has_hint_code_and_request(osb: Osb) -> None:
    said = osb("sandbox", "get", "nope", code=1).stderr.decode().splitlines()
    assert said[0] == "error: There is no sandbox nope."
    assert said[1].startswith("hint: ")
    assert "code SANDBOX::NOT_FOUND, HTTP 404, request " in said[2]
    assert len(said) == 3


def test_no_server(here: Osb) -> None:
    with socket.socket() as closed:  # bound and not listening: nobody else takes the port
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        said = here("--domain", address, "sandbox", "list", code=1).stderr.decode()
        assert said.startswith(f"error: no server at http://{address}\nhint: Start one with `opensandbox-server`")
        assert here("--domain", address, "run", "--", "true", code=125).stderr.decode().startswith("error: no server")
        assert f"none at http://{address}" in here("--domain", address, "version").stdout.decode()


def test_a_wrong_key_says_where_to_put_the_right_one(here: Osb, tmp_path: Path) -> None:
    home = tmp_path / "locked"
    home.mkdir()
    with LiveServer.started(home, config='[server]\napi_key = "right"\n') as locked:
        assert b"--api-key" in here("--domain", locked.address, "sandbox", "list", code=1).stderr
        here("--domain", locked.address, "--api-key", "wrong", "sandbox", "list", code=1)
        here("--domain", locked.address, "--api-key", "right", "sandbox", "list")
        here("--domain", locked.address, "sandbox", "list", OPEN_SANDBOX_API_KEY="right")


def test_versions(osb: Osb, server: LiveServer) -> None:
    assert osb("--version").stdout == b"opensandbox, version 1.2.0\n"
    told = answer(osb, "version")
    assert told == {"osb": "1.2.0", "sdk": "1.2.0", "server": "1.2.0", "server_url": f"http://{server.address}"}


@pytest.mark.parametrize(
    "arguments",
    [
        ["sandbox", "create", "-i", "host", "-t", "soon"],
        ["sandbox", "create", "-i", "host", "-m", "novalue"],
        ["sandbox", "create", "-i", "host", "-e", "NOT_SET_HERE"],
        ["sandbox", "create"],
        ["sandbox", "endpoint", "x", "-p", "70000"],
        ["sandbox", "list", "-o", "xml"],
        ["file", "chmod", "x", "/a", "--mode", "888"],
        ["nonsense"],
    ],
)
def test_a_wrong_command_line_is_code_2(osb: Osb, arguments: list[str]) -> None:
    assert osb(*arguments, code=2).stderr


def test_help_does_not_load_the_sdk(environment: dict[str, str]) -> None:
    """What makes a start slow is what it imports."""
    program = "import sys, opensandbox_cli.main as m; print(*sorted(sys.modules))"
    python = str(Path(OSB).parent / "python")
    loaded = subprocess.run([python, "-c", program], env=environment, capture_output=True, text=True, check=True)
    heavy = {"opensandbox", "pydantic", "httpx2", "anyio", "asyncio", "rich", "yaml", "tomlkit"}
    assert not heavy & set(loaded.stdout.split())
