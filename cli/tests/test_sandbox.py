# SPDX-License-Identifier: Apache-2.0
"""`osb sandbox`, `version`, diagnostics, and how errors are told."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import OSB, Osb
from live_server import LiveServer, until
from opensandbox.exceptions import SandboxConnectionException
from opensandbox_cli import failure
from opensandbox_cli.commands import sandbox
from opensandbox_cli.screen import Screen


class Shown(Screen):
    """Remembers the error instead of showing it."""

    message = ""

    def error(self, text: str, hint: str | None = None, facts: Sequence[str] = ()) -> None:
        self.message = text


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


def test_https_to_a_server_without_it(osb: Osb, server: LiveServer) -> None:
    said = osb("--protocol", "https", "sandbox", "list", code=1).stderr.decode().splitlines()
    assert said[0] == f"error: what answers at https://{server.address} does not speak https"
    assert "--protocol http," in said[1]


def test_a_certificate_that_is_not_trusted() -> None:
    cause = ssl.SSLCertVerificationError(1, "self-signed")
    cause.verify_message = "self-signed certificate"
    error = SandboxConnectionException("cannot connect to https://a.example: failed", cause)
    shown = Shown()
    assert failure.show(error, shown, "https://a.example") == failure.REFUSED
    assert "not trusted: self-signed certificate" in shown.message


def test_hints_speak_of_commands(osb: Osb, sandbox_id: str) -> None:
    unknown = osb("command", "status", sandbox_id, "bogus", code=1).stderr.decode()
    assert "COMMAND_NOT_FOUND" in unknown
    assert "hint: `osb command run -d` prints the id" in unknown
    brief = osb("sandbox", "create", "-i", "host", "-t", "5s", code=2).stderr.decode()
    assert brief.startswith("error: --timeout is at least one minute\nhint: `osb sandbox kill`")
    osb("config", "set", "defaults.timeout", "5s")
    assert b"defaults.timeout is at least" in osb("sandbox", "create", "-i", "host", code=2).stderr


def test_a_refused_request_names_the_field(osb: Osb) -> None:
    request = {"image": {"uri": "host"}, "entrypoint": ["true"], "resourceLimits": {}, "timeout": 5}
    said = osb("sandbox", "create", "-f", "-", stdin=json.dumps(request).encode(), code=1).stderr.decode()
    assert said.startswith("error: timeout: ")
    assert "hint: Correct what is named" in said


def test_a_page_that_is_not_there(osb: Osb, sandbox_id: str) -> None:
    said = osb("sandbox", "list", "--page", "99").stderr.decode()
    assert said.startswith("No sandboxes on page 99: ")
    assert osb("sandbox", "list", "-m", "no=such").stderr == b"No sandboxes.\n"


def test_an_endpoint_for_browsers(osb: Osb, sandbox_id: str) -> None:
    def shown(port: int, *flags: str) -> dict[str, str]:
        lines = osb(*flags, "sandbox", "endpoint", sandbox_id, "-p", str(port)).stdout.decode().splitlines()
        return {words[0]: words[-1] for words in map(str.split, lines)}

    told = shown(8000)
    ingress = told["endpoint"].partition("/")[0].rpartition(":")[2]
    assert told["browser"] == f"http://{sandbox_id}-8000.localhost:{ingress}/"
    assert "browser" not in shown(44772), "execd is nothing for a browser"
    assert "browser" not in shown(8000, "--use-server-proxy")


@pytest.mark.parametrize(
    "endpoint", ["10.0.0.7:28888/abc/80", "sandbox.example.org:28888/abc/80", "127.0.0.1:28888/other/80"]
)
def test_only_this_machine_has_names_below_localhost(endpoint: str) -> None:
    assert sandbox._browser_url(endpoint, "abc", 80) is None
    assert sandbox._browser_url("[::1]:28888/abc/80", "abc", 80) == "http://abc-80.localhost:28888/"


def test_warnings_about_an_address_are_shown(here: Osb, environment: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "open"
    home.mkdir()
    with LiveServer.started(home, config='[server]\nhost = "0.0.0.0"\napi_key = "right"\n') as server:
        environment |= {"OPEN_SANDBOX_DOMAIN": server.address, "OPEN_SANDBOX_API_KEY": "right"}
        made = here("sandbox", "create", "-i", "host", "-q").stdout.decode().strip()
        told = here("sandbox", "endpoint", made, "-p", "8000")
        here("sandbox", "kill", made)
    assert told.stderr.startswith(b"warning: ")
    assert b"use_server_proxy" in told.stderr


def test_how_it_ended_stands_beside_its_status(osb: Osb, server: LiveServer) -> None:
    words = ["sh", "-c", "until [ -e /tmp/go ]; do sleep 0.01; done; exit 3"]
    options = [part for word in words for part in ("--entrypoint", word)]
    ended = osb("sandbox", "create", "-i", "host", *options, "-q").stdout.decode().strip()
    osb("file", "write", ended, "/tmp/go", "-c", "go")
    until(lambda: server.get(ended)["status"]["state"] == "Failed", "it has ended")
    names = [line.split()[0] for line in osb("sandbox", "get", ended).stdout.decode().splitlines()]
    assert {"end.reason", "end.exit_code"} <= set(names)
    assert names.index("status") < names.index("end.reason") < names.index("end.exit_code") < names.index("image")
    server.delete(ended)


def test_choices_are_told_in_plain_words(here: Osb) -> None:
    said = here("sandbox", "list", "-o", "raw", code=2).stderr.decode()
    assert "'--output': 'raw' is not one of 'table', 'json', 'yaml'." in said


def test_the_help_is_whole_on_a_narrow_terminal(here: Osb) -> None:
    assert "..." not in here("--help", COLUMNS="80").stdout.decode().partition("Commands:")[2]


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
        ["sandbox", "create", "-i", "host", "-t", "5s"],
        ["sandbox", "create", "-i", "host", "-m", "novalue"],
        ["sandbox", "create", "-i", "host", "-e", "NOT_SET_HERE"],
        ["sandbox", "create", "-i", "host", "-e", "A B=c"],
        ["sandbox", "create", "-i", "host", "-e", "A\nB=c"],
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
