# SPDX-License-Identifier: Apache-2.0
"""The published command line 1.1.1 against this server: every command it has."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from table import Table

from live_server import LiveServer, clean_environment

PROGRAM = Path(__file__).parent / "published" / "osb.py"
# Commands that ask for what is not built yet, and what the server says to that.
LATER = {
    "sandbox pause": ["{id}"],
    "sandbox resume": ["{id}"],
    "snapshot create": ["{id}", "--name", "n"],
    "snapshot get": ["x"],
    "snapshot list": [],
    "snapshot delete": ["x"],
    "template create": ["--image", "host", "--publish", "s3://bucket/place"],
    "template get": ["x"],
    "template list": [],
    "template delete": ["x"],
    "egress get": ["{id}"],
    "egress patch": ["{id}", "--rule", "allow=allowed.example"],
    "credential-vault create": ["{id}", "--file", "vault.json"],
    "credential-vault get": ["{id}"],
    "credential-vault patch": ["{id}", "--file", "patch.json"],
    "credential-vault delete": ["{id}"],
    "credential-vault credential list": ["{id}"],
    "credential-vault credential get": ["{id}", "x"],
    "credential-vault binding list": ["{id}"],
    "credential-vault binding get": ["{id}", "x"],
}
CODES = (
    "SANDBOX::API_NOT_SUPPORTED",
    "TEMPLATE::NOT_SUPPORTED",
    "GENERAL::NOT_FOUND",
    "INGRESS::NO_EGRESS",
)
Done = subprocess.CompletedProcess[str]


class Osb:
    """Runs the program; fails when it does, unless told which code to expect."""

    def __init__(self, process: subprocess.Popen[str], table: Table) -> None:
        self._process = process
        self._table = table

    def __call__(self, *arguments: str, code: int = 0, stdin: str | None = None) -> Done:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"arguments": arguments, "stdin": stdin}) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        done = Done(arguments, told["code"], told["stdout"], told["stderr"])
        assert done.returncode == code, f"osb {' '.join(arguments)}: {done.returncode}\n{done.stdout}{done.stderr}"
        if code == 0:
            self.note(arguments, "ok")
        return done

    def note(self, arguments: tuple[str, ...], outcome: str) -> None:
        """The command is the longest beginning that is one."""
        words = " ".join(word for word in arguments if word != "--use-server-proxy") + " "
        found = [command for command in self._table.published["cli"] if words.startswith(f"{command} ")]
        self._table.cli.setdefault(max(found, key=len), set()).add(outcome)


@pytest.fixture(scope="module")
def osb(published: Path, server: LiveServer, table: Table) -> Iterator[Osb]:
    environment = clean_environment(
        server.home, OPEN_SANDBOX_DOMAIN=server.address, NO_COLOR="1", TERM="dumb", COLUMNS="200"
    )
    with subprocess.Popen(
        [str(published / "python"), str(PROGRAM)], env=environment, cwd=server.home,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield Osb(process, table)
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture(scope="module")
def sandbox_id(osb: Osb, server: LiveServer) -> Iterator[str]:
    made = json.loads(osb("sandbox", "create", "-i", "host", "-t", "10m", "-o", "json").stdout)
    assert made["status"] == "created"
    yield str(made["id"])
    server.delete(made["id"])


def test_sandboxes(osb: Osb, sandbox_id: str) -> None:
    listed = json.loads(osb("sandbox", "list", "-o", "json").stdout)
    assert sandbox_id in [item["id"] for item in listed["items"]]
    assert json.loads(osb("sandbox", "get", sandbox_id, "-o", "json").stdout)["id"] == sandbox_id
    assert json.loads(osb("sandbox", "health", sandbox_id, "-o", "json").stdout)["healthy"] is True
    osb("sandbox", "renew", sandbox_id, "-t", "20m", "-o", "json")
    endpoint = json.loads(osb("sandbox", "endpoint", sandbox_id, "-p", "8000", "-o", "json").stdout)
    assert endpoint["endpoint"].endswith("/8000")
    assert json.loads(osb("sandbox", "metrics", sandbox_id, "-o", "json").stdout)["cpu_count"] > 0


def test_diagnostics(osb: Osb, sandbox_id: str) -> None:
    assert "The sandbox is ready." in osb("devops", "events", sandbox_id).stdout
    assert sandbox_id in osb("devops", "inspect", sandbox_id).stdout
    assert "== Events" in osb("devops", "summary", sandbox_id).stdout
    osb("devops", "logs", sandbox_id, "-n", "5")
    osb("diagnostics", "logs", sandbox_id, "--scope", "container")
    told = json.loads(osb("diagnostics", "events", sandbox_id, "--scope", "runtime", "-o", "json").stdout)
    assert "created" in told["content"]
    assert "DIAGNOSTICS_SCOPE_UNSUPPORTED" in osb("diagnostics", "logs", sandbox_id, "--scope", "x", code=1).stderr


def test_a_command_prints_what_it_printed(osb: Osb, sandbox_id: str) -> None:
    """The texts are printed one after the other, so line breaks must be in them."""
    done = osb("command", "run", sandbox_id, "-o", "raw", "--", "printf", "line1\\nline2\\nline3\\n")
    assert done.stdout.removesuffix("\n") == "line1\nline2\nline3"
    done = osb("command", "run", sandbox_id, "-o", "raw", "--", "python3", "-c", "print(6*7)")
    assert done.stdout.strip() == "42"


def test_a_command_that_fails(osb: Osb, sandbox_id: str) -> None:
    osb("command", "run", sandbox_id, "-o", "raw", "--", "sh", "-c", "exit 3", code=1)


def test_a_session(osb: Osb, sandbox_id: str) -> None:
    made = json.loads(osb("command", "session", "create", sandbox_id, "-w", "/tmp/work", "-o", "json").stdout)
    session = made["session_id"]
    osb("command", "session", "run", sandbox_id, session, "-o", "raw", "--", "cd", "..")
    done = osb("command", "session", "run", sandbox_id, session, "-o", "raw", "--", "pwd")
    assert done.stdout.strip() == "/tmp"
    osb("command", "session", "run", sandbox_id, session, "-o", "raw", "--", "false", code=1)
    osb("command", "session", "delete", sandbox_id, session)
    assert "CONTEXT_NOT_FOUND" in osb("command", "session", "delete", sandbox_id, session, code=1).stderr


def test_a_command_in_the_background(osb: Osb, sandbox_id: str) -> None:
    started = json.loads(osb("command", "run", sandbox_id, "-d", "-o", "json", "--", "sleep", "1000").stdout)
    status = json.loads(osb("command", "status", sandbox_id, started["execution_id"], "-o", "json").stdout)
    assert status["running"] is True
    osb("command", "interrupt", sandbox_id, started["execution_id"])
    status = json.loads(osb("command", "status", sandbox_id, started["execution_id"], "-o", "json").stdout)
    assert status["running"] is False
    osb("command", "logs", sandbox_id, started["execution_id"])


def test_files(osb: Osb, sandbox_id: str, tmp_path: Path) -> None:
    osb("file", "write", sandbox_id, "/tmp/cli.txt", "-c", "from the command line")
    assert osb("file", "cat", sandbox_id, "/tmp/cli.txt").stdout.strip() == "from the command line"
    local = tmp_path / "up.bin"
    local.write_bytes(bytes(range(256)) * 1000)
    osb("file", "upload", sandbox_id, str(local), "/tmp/up.bin")
    osb("file", "download", sandbox_id, "/tmp/up.bin", str(tmp_path / "down.bin"))
    assert (tmp_path / "down.bin").read_bytes() == local.read_bytes()
    assert "/tmp/up.bin" in osb("file", "search", sandbox_id, "/tmp", "-p", "up.*", "-o", "json").stdout


def test_files_in_every_other_way(osb: Osb, sandbox_id: str) -> None:
    osb("file", "mkdir", sandbox_id, "/tmp/made/deep", "--mode", "0750")
    osb("file", "write", sandbox_id, "/tmp/made/one", stdin="from stdin")
    osb("file", "mv", sandbox_id, "/tmp/made/one", "/tmp/made/two")
    osb("file", "replace", sandbox_id, "/tmp/made/two", "--old", "stdin", "--new", "there")
    assert osb("file", "cat", sandbox_id, "/tmp/made/two").stdout.strip() == "from there"
    osb("file", "chmod", sandbox_id, "/tmp/made/two", "--mode", "0600")
    shown = osb("file", "info", sandbox_id, "/tmp/made/two", "/tmp/made/deep", "-o", "json").stdout
    assert '"mode": 600' in shown
    assert '"mode": 750' in shown
    osb("file", "rm", sandbox_id, "/tmp/made/two")
    osb("file", "cat", sandbox_id, "/tmp/made/two", code=1)
    osb("file", "rmdir", sandbox_id, "/tmp/made")
    osb("file", "info", sandbox_id, "/tmp/made", code=1)


def test_through_the_server(osb: Osb, sandbox_id: str) -> None:
    done = osb("--use-server-proxy", "command", "run", sandbox_id, "-o", "raw", "--", "echo", "through")
    assert done.stdout.strip() == "through"
    osb("--use-server-proxy", "file", "write", sandbox_id, "/tmp/through", "-c", "proxied")
    assert osb("file", "cat", sandbox_id, "/tmp/through").stdout.strip() == "proxied"


def test_what_needs_no_server(osb: Osb) -> None:
    osb("config", "init")
    osb("config", "set", "defaults.image", "host")
    assert "host" in osb("config", "show", "-o", "json").stdout
    name = json.loads(osb("skills", "list", "-o", "json").stdout)["skills"][0]["slug"]
    assert osb("skills", "show", name).stdout
    osb("skills", "install", name, "--target", "claude", "--scope", "project")
    osb("skills", "uninstall", name, "--target", "claude", "--scope", "project")


@pytest.mark.parametrize("command", LATER)
def test_what_comes_later_is_refused_clearly(osb: Osb, server: LiveServer, sandbox_id: str, command: str) -> None:
    (server.home / "vault.json").write_text('{"credentials": [], "bindings": []}')
    (server.home / "patch.json").write_text('{"credentials": {}, "bindings": {}}')
    arguments = (*command.split(), *(word.replace("{id}", sandbox_id) for word in LATER[command]))
    done = osb(*arguments, code=1)
    shown = "".join((done.stdout + done.stderr).split())
    code = next((code for code in CODES if code in shown), None)
    assert code is not None, done.stdout + done.stderr
    osb.note(arguments, f"refused: {code}")


def test_errors_are_shown(osb: Osb) -> None:
    done = osb("sandbox", "get", str(uuid.uuid4()), code=1)
    assert "SANDBOX::NOT_FOUND" in done.stdout + done.stderr


def test_kill(osb: Osb) -> None:
    made = json.loads(osb("sandbox", "create", "-i", "host", "-o", "json").stdout)
    osb("sandbox", "kill", made["id"], "-o", "json")
    osb("sandbox", "get", made["id"], code=1)


def test_the_program_itself(published: Path, server: LiveServer, sandbox_id: str) -> None:
    """Everything above forks an `osb` that was imported before; this is the one on the disk."""
    environment = clean_environment(server.home, OPEN_SANDBOX_DOMAIN=server.address, NO_COLOR="1", TERM="dumb")
    arguments = [str(published / "osb"), "command", "run", sandbox_id, "-o", "raw", "--", "sh", "-c", "echo hi; exit 4"]
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (1, "hi")


def test_every_command_is_covered(request: pytest.FixtureRequest, table: Table) -> None:
    """The list comes from the published program itself. Says nothing when only some of the tests above were chosen."""
    chosen = {item.originalname for item in request.session.items if isinstance(item, pytest.Function)}
    if {name for name in globals() if name.startswith("test_")} <= chosen:
        assert table.uncovered_commands() == []
