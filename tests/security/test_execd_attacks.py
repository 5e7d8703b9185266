# SPDX-License-Identifier: Apache-2.0
"""Programs inside that lie in wait for execd: it has rights that they have not, and open files that lead to the host.

Each attack is refused or harmless. One sandbox for all of them, and at its end execd still answers. The packages of
node/ have the same in detail; here everything is real.
"""

from __future__ import annotations

import ast
import io
import json
import socket
import tarfile
import threading
import urllib.parse
from collections.abc import Callable, Iterator

import pytest

from live_server import Answer, LiveServer, Sandbox, events_of, output_of, until

TOKEN = "X-EXECD-ACCESS-TOKEN"
MARK = b"mark-of-the-attacker"
# Through /proc/self a path of execd's leads to execd: its open files, its memory, what it was started with.
PROC = (
    "/proc/self/fd", "/proc/1/fd", "/proc/thread-self/fd", "/proc/self/task/1/fd", "/proc/self/root/proc/self/fd",
    "/proc/self/cwd", "/proc/self/environ", "/proc/self/mem", "/proc/1/root/etc/passwd", "/proc/self/map_files",
)  # fmt: skip


def query(path: str) -> str:
    return "?path=" + urllib.parse.quote(path)


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for info, data in members:
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


# Everything that reads, writes, makes or removes something at a path.
OPERATIONS: dict[str, Callable[[Sandbox, str], Answer]] = {
    "download": lambda s, path: s.call("GET", "/files/download" + query(path), timeout=20),
    "tar": lambda s, path: s.call("GET", "/files/tar" + query(path), timeout=20),
    "list": lambda s, path: s.call("GET", "/directories/list" + query(path), timeout=20),
    "put": lambda s, path: s.call("PUT", "/files/content" + query(path), body=MARK, timeout=20),
    "untar": lambda s, path: s.call("POST", "/files/tar" + query(path), body=archive((member("x"), MARK)), timeout=20),
    "chmod": lambda s, path: s.call("POST", "/files/permissions", body={path: {"mode": 777}}, timeout=20),
    "replace": lambda s, path: s.call("POST", "/files/replace", body={path: {"old": "root", "new": "x"}}, timeout=20),
    "mkdir": lambda s, path: s.call("POST", "/directories", body={path + "/made": {}}, timeout=20),
    "move": lambda s, path: s.call(
        "POST", "/files/mv", body=[{"src": "/tmp/bait", "dest": path + "/moved"}], timeout=20
    ),
    "watch": lambda s, path: s.call("GET", "/files/watch" + query(path + "/none"), timeout=20),
}


@pytest.fixture(scope="module")
def sandbox(server: LiveServer) -> Iterator[Sandbox]:
    made = server.create(resourceLimits={"cpu": "1", "memory": "256Mi", "pids": "64"})
    made.write("/tmp/bait", b"bait")
    yield made
    assert made.ping(), "execd did not outlive the attacks"
    server.delete(made.id)


def refused(answer: Answer) -> None:
    """By a code of ours, and without a word of what execd has."""
    assert 400 <= answer.status < 500 or answer.json()["code"] in ("RUNTIME_ERROR", "NOT_SUPPORTED"), answer
    assert answer.json()["message"]


# -- links, dots and /proc -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_path_leads_to_execd_itself(sandbox: Sandbox, operation: str) -> None:
    sandbox.run("mkdir -p /tmp/planted; ln -sfn /proc/self/fd /tmp/planted/fds; ln -sfn /proc /tmp/planted/proc; "
                "ln -sfn fds /tmp/planted/again; ln -sfn /proc/1/root /tmp/planted/root")  # fmt: skip
    for path in (*PROC, "/tmp/planted/fds", "/tmp/planted/again", "/tmp/planted/proc/self/fd", "/tmp/planted/root/tmp"):
        for tail in ("", "/0", "/../fd/3"):
            refused(OPERATIONS[operation](sandbox, path + tail))
    assert sandbox.read("/tmp/bait") == b"bait"


def test_dots_end_at_the_root_of_the_sandbox(server: LiveServer, sandbox: Sandbox) -> None:
    climbing = "/tmp" + "/.." * 40 + "/tmp/climbed"
    sandbox.call("PUT", "/files/content" + query(climbing), body=MARK).expect(200)
    assert sandbox.run("cat /tmp/climbed").stdout.encode() == MARK
    refused(OPERATIONS["download"](sandbox, "/tmp" + "/.." * 40 + str(server.state / "instance")))


@pytest.mark.parametrize(
    "members",
    [
        [(member("../escaped"), MARK)],
        [(member("/tmp/escaped"), MARK)],
        [(member("a/../../escaped"), MARK)],
        [(member("l", tarfile.SYMTYPE, ".."), b""), (member("l/escaped"), MARK)],
        [(member("l", tarfile.SYMTYPE, "/tmp"), b""), (member("l/escaped"), MARK)],
        [(member("h", tarfile.LNKTYPE, "../bait"), b""), (member("h"), MARK)],
        [(member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")],
        [(member("device", tarfile.CHRTYPE), b"")],
        [(member("device", tarfile.BLKTYPE), b"")],
    ],
    ids=["dots", "absolute", "dots inside", "by a link", "by an absolute link", "hard link", "absolute hard link",
         "character device", "block device"],
)  # fmt: skip
def test_an_archive_stays_where_it_is_unpacked(sandbox: Sandbox, members: list[tuple[tarfile.TarInfo, bytes]]) -> None:
    sandbox.run("rm -rf /tmp/unpack /tmp/escaped; mkdir /tmp/unpack")
    sandbox.call("POST", "/files/tar" + query("/tmp/unpack"), body=archive(*members))
    assert sandbox.run("ls /tmp/escaped").exit_code != 0
    assert sandbox.run("find /tmp/unpack -type c -o -type b -o -type p -o -samefile /etc/passwd").stdout == ""
    assert sandbox.read("/tmp/bait") == b"bait"


def test_what_is_written_does_not_pass_through_links(sandbox: Sandbox) -> None:
    sandbox.run("cd /tmp; echo kept >kept; rm -f hard; ln kept hard; chmod 600 kept")
    sandbox.call("PUT", "/files/content" + query("/tmp/hard"), body=MARK).expect(200)
    assert sandbox.run("cat /tmp/kept").stdout == "kept"
    # Another user's wish does not get execd's rights through a name that leads to a file of root.
    sandbox.run("mkdir -p /tmp/of-1000; chown 1000:1000 /tmp/of-1000; ln -f /tmp/kept /tmp/of-1000/hard; "
                "ln -sfn /root /tmp/of-1000/soft; touch /root/private; chmod 700 /root")  # fmt: skip
    for path in ("/tmp/of-1000/hard", "/tmp/of-1000/soft/private"):
        refused(sandbox.call("GET", "/v1/filesystem/1000/1000/files/download" + query(path)))
    refused(sandbox.call("PUT", "/v1/filesystem/1000/1000/files/content" + query("/tmp/of-1000/soft/x"), body=MARK))
    assert sandbox.run("cat /tmp/kept; ls /root/x").stdout == "kept"


def test_a_directory_that_becomes_a_link_between_check_and_use(sandbox: Sandbox) -> None:
    """A program exchanges the two as fast as it can, all the while; what execd does goes to the first or nowhere."""
    swapper = sandbox.start("""python3 -c '
import ctypes, os
libc = ctypes.CDLL(None)
os.makedirs("/tmp/swap/d", exist_ok=True)
os.symlink("/proc/1/fd", "/tmp/swap/l")
print("swapping", flush=True)
while True:
    libc.renameat2(-100, b"/tmp/swap/d", -100, b"/tmp/swap/l", 2)
'""")
    until(lambda: b"swapping" in sandbox.logs(swapper), "the program swaps")
    outcomes = set()
    for turn in range(40):
        for name in ("put", "untar", "download", "tar", "chmod", "mkdir"):
            answer = OPERATIONS[name](sandbox, "/tmp/swap/d" if name in ("untar", "mkdir", "tar") else "/tmp/swap/d/x")
            outcomes.add(answer.status)
            if answer.status == 200 and name == "download":
                assert answer.body == MARK, turn
            if answer.status == 200 and name == "tar":
                with tarfile.open(fileobj=io.BytesIO(answer.body)) as packed:
                    inside = {one.name.split("/")[-1] for one in packed}
                assert inside <= {"d", "x", "made", "", "."}, inside
    sandbox.call("DELETE", f"/command?id={swapper}").expect(200)
    assert 200 in outcomes, "not even one went through: the attack is not what was measured"


# -- devices and pipes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/full", "/dev/null", "/tmp/fifo", "/tmp/socket", "/tmp/to-fifo"])
def test_what_is_no_file_is_not_read_nor_waited_for(sandbox: Sandbox, path: str) -> None:
    sandbox.python("import os, socket\n"
                   "for made in ('/tmp/fifo', '/tmp/socket', '/tmp/to-fifo'):\n"
                   "    if os.path.lexists(made): os.unlink(made)\n"
                   "os.mkfifo('/tmp/fifo'); socket.socket(socket.AF_UNIX).bind('/tmp/socket')\n"
                   "os.symlink('fifo', '/tmp/to-fifo')")  # fmt: skip
    refused(OPERATIONS["download"](sandbox, path))
    refused(OPERATIONS["replace"](sandbox, path))
    assert OPERATIONS["put"](sandbox, path).status in (200, 400, 403, 409)  # in its place, or not at all
    assert sandbox.ping()


# -- the way to programs ---------------------------------------------------------------------------------------------

LISTENER = """
import http.server
class Listener(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        if self.headers.get("Transfer-Encoding"):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size); self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with open("/tmp/heard", "a") as heard:
            heard.write(repr((self.command, self.path, body.decode("latin-1"), str(self.headers))) + "\\n")
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    do_GET = do_POST = answer
    def log_message(self, *args): pass
http.server.ThreadingHTTPServer(("127.0.0.1", 8000), Listener).serve_forever()
"""


def test_nothing_is_smuggled_through_the_proxy(sandbox: Sandbox) -> None:
    sandbox.write("/tmp/listener.py", LISTENER.encode())
    sandbox.start("exec python3 /tmp/listener.py")
    until(lambda: sandbox.call("GET", "/proxy/8000/up").status == 200, "the program answers")
    sandbox.run(": >/tmp/heard")
    base = f"{sandbox.prefix}/proxy/8000"
    token = sandbox.headers[TOKEN]
    begin = f"POST {base}/first HTTP/1.1\r\nHost: {sandbox.address}\r\n{TOKEN}: {token}\r\nConnection: close\r\n"
    smuggled = f"GET {base}/smuggled HTTP/1.1\r\nHost: {sandbox.address}\r\n{TOKEN}: {token}\r\n\r\n"
    for headers in (
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        "Content-Length: 0\r\nContent-Length: 9\r\n\r\n",
        "Content-Length:\r\n 0\r\n\r\n",
        "Content-Length : 0\r\n\r\n",
        "X: a\rContent-Length: 9\r\n\r\n",
        "X: a\nContent-Length: 0\n\n",
        f"Connection: Content-Length, {TOKEN}\r\nContent-Length: 0\r\n\r\n",
        f"Connection: Upgrade, {TOKEN}\r\nUpgrade: websocket\r\nContent-Length: 0\r\n\r\n",
    ):
        host, _, port = sandbox.address.partition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall((begin + headers + smuggled).encode())
            while connection.recv(65536):
                pass
    sandbox.call("GET", "/proxy/8000/last").expect(200)  # on a connection that was poisoned, if one was
    heard = [ast.literal_eval(line) for line in sandbox.run("cat /tmp/heard").stdout.splitlines()]
    assert {path for _, path, _, _ in heard} == {"/first", "/last"}
    assert all(body == "" for _, _, body, _ in heard)
    assert not any(token in headers or TOKEN.lower() in headers.lower() for *_, headers in heard)


# -- ends and tokens -------------------------------------------------------------------------------------------------

FORGED = (
    '{"type":"execution_complete","timestamp":1,"execution_time":1}\n\n'
    '{"type":"error","error":{"ename":"CommandExecError","evalue":"7","traceback":[]}}\n\n'
    'data: {"type":"execution_complete"}\r\n\r\n: ping\n\nevent: end\nid: 1\n'
)


def test_the_end_of_a_command_cannot_be_forged(sandbox: Sandbox) -> None:
    sandbox.write("/tmp/forged", FORGED.encode())
    done = sandbox.run("cat /tmp/forged; cat /tmp/forged >&2; echo after; exit 5")
    ends = [event for event in done.events if event["type"] in ("error", "execution_complete")]
    assert len(ends) == 1
    assert done.events[-1] is ends[0]
    assert done.exit_code == 5
    assert "after" in done.stdout
    assert '"evalue":"7"' in done.stdout


def test_the_end_of_a_run_in_a_session_cannot_be_forged(sandbox: Sandbox) -> None:
    made = sandbox.call("POST", "/session", body={}).expect(200).json()["session_id"]
    # All it could write to: what it is given, what the shell has open, and terminals of its parents.
    script = (
        "cat /tmp/forged; for fd in /proc/$$/fd/*; do cat /tmp/forged >$fd; done 2>/dev/null; "
        "printf 'exit 0\\n0\\n' | tee /proc/$PPID/fd/* /dev/tty >/dev/null 2>&1; echo after; (exit 6)"
    )
    answer = sandbox.call("POST", f"/session/{made}/run", body={"command": script, "timeout": 20000}, timeout=60)
    events = events_of(answer.expect(200).body)
    assert [event["type"] for event in events].count("init") == 1
    assert [event["type"] for event in events if event["type"] in ("error", "execution_complete")] == [
        events[-1]["type"]
    ]
    assert output_of(answer.body).exit_code == 6
    sandbox.call("DELETE", f"/session/{made}").expect(200)


def test_the_token_cannot_be_read_while_it_is_used(sandbox: Sandbox) -> None:
    """A program looks through all of /proc that it may read, and through what execd passes on, while requests come."""
    token = sandbox.headers[TOKEN]
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            sandbox.call("GET", "/metrics").expect(200)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        half = len(token) // 2
        found = sandbox.python(
            f"""
import glob, json
secret = {json.dumps(token[:half])} + {json.dumps(token[half:])}
mine = open("/proc/self/stat").read().split()[0]
seen = 0
for turn in range(5):
    for pattern in ("environ", "cmdline", "comm", "status", "stack", "syscall", "maps", "mem", "net/unix"):
        for name in glob.glob("/proc/[0-9]*/" + pattern):
            if name.split("/")[2] == mine:
                continue
            try:
                with open(name, "rb", buffering=0) as file:
                    text = file.read(1 << 16) or b""
            except OSError:
                continue
            seen += 1
            if secret.encode() in text:
                print("FOUND", name)
print("looked" if seen > 10 else "saw nothing")
"""
        )
    finally:
        stop.set()
        asking.join()
    assert found.stdout == "looked"
