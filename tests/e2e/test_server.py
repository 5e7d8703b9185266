# SPDX-License-Identifier: Apache-2.0
"""The real program, as a newcomer meets it: starting, being refused, stopping."""

from __future__ import annotations

import os
import signal
import socket
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from live_server import LiveServer, clean_environment, request, server_command, until


def run(*arguments: str, home: Path, timeout: float = 30, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the program to its end; for starts that are refused."""
    return subprocess.run(
        [*server_command(), *arguments],
        env=clean_environment(home, **environment),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def refused(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) <= 2, ended.stderr
    return ended.stderr


# -- starting ------------------------------------------------------------------------------------------------------


def test_it_says_what_it_is_and_serves(server: LiveServer) -> None:
    said = "\n".join(server.lines)
    assert said.startswith("opensandbox-server 1.2.0")
    for name in ("config", "api", "ingress", "state", "runtime", "isolation"):
        assert f"\n  {name}" in said
    assert "reconcile" not in server.log.read_text(), "it would stand between these lines"
    assert server.call("GET", "/health").expect(200).json() == {"status": "healthy"}
    assert server.call("GET", "/version").expect(200).json() == {"version": "1.2.0"}


def test_it_listens_on_loopback_of_both_families(server: LiveServer) -> None:
    port = int(server.address.rpartition(":")[2])
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with socket.socket(family) as client:
            client.settimeout(5)
            client.connect((address, port))


def test_a_file_in_the_home_directory_is_read_and_named(home: Path) -> None:
    (home / ".sandbox.toml").write_text("[server]\nprot = 1\n")
    error = refused(run("--state-dir", str(home / "state"), home=home))
    assert f"{home}/.sandbox.toml: [server] prot is not known; did you mean port" in error


def test_beyond_loopback_other_ports_are_reached_through_the_server(home: Path) -> None:
    config = '[server]\nhost = "0.0.0.0"\nport = 0\napi_key = "key"\n[log]\nlevel = "DEBUG"\n'
    key = {"OPEN-SANDBOX-API-KEY": "key"}
    with LiveServer.started(home, config=config) as server:
        assert "use_server_proxy" in next(line for line in server.lines if line.startswith("  note"))
        body = {"image": {"uri": "host"}, "entrypoint": ["python3", "-m", "http.server", "8000"], "resourceLimits": {}}
        made = server.call("POST", "/v1/sandboxes", body=body, headers=key).expect(202).json()
        endpoints = f"/v1/sandboxes/{made['id']}/endpoints/8000"
        direct = server.call("GET", endpoints, headers=key).expect(200).json()
        assert "use_server_proxy" in direct["warnings"][0]
        address, _, path = direct["endpoint"].partition("/")
        assert "use_server_proxy" in request(address, "GET", f"/{path}/", headers=key).expect(403).json()["hint"]
        proxied = server.call("GET", f"{endpoints}?use_server_proxy=true", headers=key).expect(200).json()
        assert "warnings" not in proxied
        address, _, path = proxied["endpoint"].partition("/")
        until(lambda: request(address, "GET", f"/{path}/", headers=key).status == 200, "the program answers")
        assert '"level":"debug"' in (server.state / "log" / "sandboxd.log").read_text(), "[log] level is passed on"


def test_the_status_of_an_ended_sandbox_says_how(server: LiveServer) -> None:
    sandbox = server.create(entrypoint=("sh", "-c", "exit 3"))
    until(lambda: "end" in server.get(sandbox.id), "it ends")
    assert server.get(sandbox.id)["status"]["message"] == "The entry point exited with code 3."
    told = server.call("GET", f"/v1/sandboxes/{sandbox.id}/diagnostics/events?scope=runtime").expect(200).json()
    assert "Failed ended: The entry point exited with code 3." in told["content"]
    server.call("DELETE", f"/v1/sandboxes/{sandbox.id}").expect(204)


def test_help_says_how(home: Path) -> None:
    ended = run("--help", home=home)
    assert ended.returncode == 0
    for word in ("--config", "--host", "--port", "--state-dir", "down --all", "SANDBOX_CONFIG_PATH"):
        assert word in ended.stdout


def test_init_config_writes_a_file_that_a_server_starts_with(home: Path) -> None:
    file = home / "sandbox.toml"
    told = run("init-config", str(file), "--example", "local", home=home)
    assert told.returncode == 0, told.stderr
    assert file.stat().st_mode & 0o777 == 0o600
    assert "--force" in refused(run("init-config", str(file), home=home))
    with LiveServer.started(home, config=file.read_text().replace("port = 8080", "port = 0")) as server:
        assert server.call("GET", "/health").status == 200


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_a_runtime_that_is_not_built_is_refused(home: Path, kind: str) -> None:
    file = home / "sandbox.toml"
    file.write_text(f'[runtime]\ntype = "{kind}"\n')
    assert "not built yet" in refused(run("--config", str(file), home=home))


def test_an_open_address_without_a_key_is_refused(home: Path) -> None:
    assert "API key" in refused(run("--host", "0.0.0.0", "--state-dir", str(home / "state"), home=home))


def test_a_port_in_use_names_its_holder(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        error = refused(run("--port", str(port), "--state-dir", str(home / "state"), home=home))
    assert f"Port {port} on 127.0.0.1 is in use by" in error
    assert f"(pid {os.getpid()})" in error
    assert "--port" in error


def test_a_port_of_our_own_server_is_recognised(server: LiveServer, home: Path) -> None:
    port = server.address.rpartition(":")[2]
    error = refused(run("--port", port, "--state-dir", str(home / "state"), home=home))
    assert f"another OpenSandbox server (pid {server.pid})" in error


def test_a_second_server_on_the_same_state_names_the_first(server: LiveServer, home: Path) -> None:
    error = refused(run("--port", "0", "--state-dir", str(server.state), home=home))
    assert f"pid {server.pid} at {server.url}" in error
    assert server.call("GET", "/health").status == 200


def test_a_foreign_state_directory_is_refused(home: Path) -> None:
    (home / "notes.txt").write_text("mine")
    assert "notes.txt" in refused(run("--port", "0", "--state-dir", str(home), home=home))


def test_a_newer_database_is_refused(home: Path) -> None:
    with LiveServer.started(home) as server:
        server.stop()
        with sqlite3.connect(server.state / "opensandbox.db") as database:
            database.execute("UPDATE schema_version SET version = 999")
        error = refused(run("--port", "0", "--state-dir", str(server.state), home=home))
        assert "newer" in error


def test_a_database_of_another_instance_is_refused(home: Path) -> None:
    with LiveServer.started(home) as server:
        server.stop()
        file = server.state / "instance"
        kept = file.read_text()
        file.write_text("f" * 32 + "\n")
        error = refused(run("--port", "0", "--state-dir", str(server.state), home=home))
        assert "ffffffff" in error
        file.write_text(kept)


def test_a_copy_of_a_running_state_directory_is_refused_and_harms_nothing(home: Path) -> None:
    with LiveServer.started(home) as server:
        kept = server.create()
        copy = home / "copy"
        subprocess.run(["cp", "-a", str(server.state), str(copy)], check=True)
        made_since = server.create()
        for more in ((), ("down",), ("down", "--all")):
            told = refused(run(*more, "--state-dir", str(copy), *(() if more else ("--port", "0")), home=home))
            assert f"{copy} is a copy of {server.state}, whose sandboxd runs" in told
            assert f"--state-dir {server.state}" in told
        assert kept.ping()
        assert made_since.ping()
        assert server.call("GET", "/health").status == 200
        # A link to the directory is not a copy of it.
        link = home / "link"
        link.symlink_to(server.state)
        assert run("down", "--state-dir", str(link), home=home).returncode == 0
        # What the message says helps.
        assert server.down("--all").returncode == 0
        server.state = copy
        server.start()
        assert server.get(kept.id)["status"]["state"] in ("Failed", "Terminated")
        assert server.call("GET", f"/v1/sandboxes/{made_since.id}").status == 404


def test_dead_sockets_of_a_killed_server_do_not_matter(home: Path) -> None:
    with LiveServer.started(home) as server:
        server.create()
        server.kill()
        for pid, command in server.processes().items():
            if "sandboxd" in command.split(" ")[0]:
                os.kill(pid, signal.SIGKILL)
        assert (server.run_dir / "sandboxd.sock").exists()
        server.start()
        assert len(server.ids()) == 1


def test_without_linux_it_says_so_at_once(home: Path) -> None:
    """A platform is only a name to the program; the name is changed before it looks."""
    script = "import sys; sys.platform = 'darwin'; from opensandbox_server.__main__ import main; sys.exit(main([]))"
    import sys

    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", script], env=clean_environment(home), capture_output=True, text=True, check=False
    )
    assert "needs Linux" in refused(ended)
    assert time.monotonic() - started < 10


# -- requests --------------------------------------------------------------------------------------------------------


def test_a_page_of_another_site_may_not_call(server: LiveServer) -> None:
    answer = server.call("GET", "/v1/sandboxes", headers={"Origin": "https://evil.example"})
    assert answer.status == 403
    assert answer.json()["code"] == "FOREIGN_ORIGIN"
    assert "access-control-allow-origin" not in answer.headers
    rebound = server.call("GET", "/v1/sandboxes", headers={"Host": "evil.example"})
    assert rebound.status == 403


def test_the_ingress_refuses_foreign_names_too(server: LiveServer) -> None:
    sandbox = server.create()
    answer = sandbox.call("GET", "/ping", headers={"Host": "evil.example"})
    assert answer.status == 403
    server.delete(sandbox.id)


def test_an_unknown_image_is_answered_with_what_is_there(server: LiveServer) -> None:
    body = {"image": {"uri": "redis:7"}, "entrypoint": ["redis-server"], "resourceLimits": {}}
    answer = server.call("POST", "/v1/sandboxes", body=body)
    assert answer.status == 404
    told = answer.json()
    assert told["code"] == "IMAGE::NOT_FOUND"
    assert "redis:7" in told["message"]
    assert "host" in told["message"]
    assert "opensandbox/code-interpreter" in told["message"]
    assert server.ids() == set()


def test_a_key_is_asked_for_and_compared(home: Path) -> None:
    with LiveServer.started(home, OPENSANDBOX_SERVER_API_KEY="right") as server:
        assert server.call("GET", "/v1/sandboxes").json()["code"] == "MISSING_API_KEY"
        wrong = server.call("GET", "/v1/sandboxes", headers={"OPEN-SANDBOX-API-KEY": "wrong"})
        assert (wrong.status, wrong.json()["code"]) == (401, "INVALID_API_KEY")
        assert server.call("GET", "/v1/sandboxes", headers={"OPEN-SANDBOX-API-KEY": "right"}).status == 200
        assert server.call("GET", "/health").status == 200


def test_a_wrong_token_is_refused_by_the_sandbox(server: LiveServer) -> None:
    sandbox = server.create()
    for token in ("", "wrong", "0" * 64):
        answer = sandbox.call("POST", "/command", body={"command": "true"}, headers={"X-EXECD-ACCESS-TOKEN": token})
        assert answer.status == 401
    other = server.create()
    borrowed = sandbox.call("POST", "/command", body={"command": "true"}, headers=other.headers)
    assert borrowed.status == 401
    server.delete(sandbox.id)
    server.delete(other.id)


def test_a_client_that_leaves_in_the_middle_of_a_create_leaves_a_whole_sandbox(server: LiveServer) -> None:
    host, _, port = server.address.rpartition(":")
    body = b'{"image":{"uri":"host"},"entrypoint":["sleep","infinity"],"resourceLimits":{}}'
    head = f"POST /v1/sandboxes HTTP/1.1\r\nHost: {server.address}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    (sandbox_id,) = until(lambda: server.ids(), "the sandbox is there")
    until(lambda: server.get(sandbox_id)["status"]["state"] == "Running", "it runs")
    assert server.connect(sandbox_id).run("echo here").stdout == "here"
    server.delete(sandbox_id)


# -- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_server_and_nothing_else(home: Path, number: int) -> None:
    with LiveServer.started(home) as server:
        sandbox = server.create()
        assert server.signal(number) == 0
        assert sandbox.run("echo alive").stdout == "alive"
        server.start()
        assert server.ids() == {sandbox.id}
        assert "  sandboxes  1 adopted since the last server" in server.lines


def test_an_idle_sandboxd_leaves_with_the_server(home: Path) -> None:
    with LiveServer.started(home) as server:
        sandbox = server.create()
        server.delete(sandbox.id)
        assert server.stop() == 0
        until(lambda: not server.processes(), f"no process is left: {server.processes()}", 10)


def test_down_stops_the_server_and_leaves_sandboxes(home: Path) -> None:
    with LiveServer.started(home) as server:
        sandbox = server.create()
        ended = server.down()
        assert ended.returncode == 0, ended.stderr
        assert f"pid {server.pid}" in ended.stdout
        assert "1 sandbox lives on" in ended.stdout
        assert server.process is not None
        assert server.process.wait(5) == 0
        assert sandbox.ping()
        server.start()
        assert server.ids() == {sandbox.id}


def test_down_all_ends_everything(home: Path) -> None:
    with LiveServer.started(home) as server:
        made = [server.create() for _ in range(3)]
        ended = server.down("--all")
        assert ended.returncode == 0, ended.stderr
        assert "Ending 3 sandboxes" in ended.stdout
        assert server.leftovers() == []
        assert server.process is not None
        assert server.process.wait(5) == 0
        # The next server knows how they ended.
        server.start()
        for one in made:
            assert server.get(one.id)["status"]["state"] == "Terminated"
            assert server.get(one.id)["end"]["reason"] == "killed"


def test_down_with_nothing_running_says_so(home: Path) -> None:
    ended = run("down", "--state-dir", str(home / "state"), home=home)
    assert ended.returncode == 0
    assert "Nothing runs" in ended.stdout
    with LiveServer.started(home) as server:
        server.down("--all")
        again = server.down("--all")
        assert again.returncode == 0
        assert "Nothing runs" in again.stdout
