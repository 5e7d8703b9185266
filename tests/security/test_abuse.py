# SPDX-License-Identifier: Apache-2.0
"""Programs that take all they can get: they are ended, with a typed reason, and nobody else notices."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import pytest

from live_server import Sandbox, until

SMALL = {"cpu": "500m", "memory": "128Mi", "pids": "64"}
Create = Callable[..., Sandbox]


def limited(sandbox: Sandbox, name: str) -> None:
    if sandbox.created["isolation"]["limits"][name]["means"] == "none":
        pytest.skip(f"this host enforces no {name} limit: {sandbox.created['isolation'].get('missing')}")


def test_a_memory_bomb_ends_the_command_and_says_so(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "memory")
    bystander = sandbox.start("echo alive; sleep 300")
    output = sandbox.run(["python3", "-c", "x = [bytearray(1 << 20) for _ in range(4096)]"])
    assert output.end["reason"] == "out_of_memory"
    assert sandbox.ping()
    assert sandbox.run("echo still here").stdout == "still here"
    assert sandbox.status(bystander)["running"]


def test_memory_hidden_in_a_file_system_counts_too(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "memory")
    output = sandbox.run("head -c 1G /dev/zero > /dev/shm/big; echo $?; rm -f /dev/shm/big")
    assert output.end["reason"] == "out_of_memory" or output.stdout.split()[0] != "0"
    assert sandbox.ping()


def test_a_fork_bomb_stays_inside_and_can_be_ended(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "pids")
    bomb = sandbox.start("bomb() { bomb | bomb & }; bomb; sleep 300")
    until(lambda: sandbox.call("GET", "/ping").status == 200, "execd answers under a fork bomb")
    sandbox.call("DELETE", f"/command?id={bomb}").expect(200)
    ended = sandbox.wait(bomb)
    assert ended["end"]["reason"] in ("killed", "signalled")
    until(lambda: _runs(sandbox), "commands run again after the bomb")
    processes = until(lambda: int(sandbox.run("ls -d /proc/[0-9]* | wc -l").stdout or 99) < 20, "the bomb is gone")
    assert processes


def test_a_fork_bomb_that_ends_by_itself_has_a_typed_end(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "pids")
    script = (
        "import os, sys\nchildren = 0\n"
        "try:\n    while True:\n        if os.fork() == 0:\n            import time; time.sleep(60)\n"
        "        children += 1\n"
        "except OSError as error:\n    print(children, error.errno); sys.exit(7)\n"
    )
    output = sandbox.python(script)
    assert (output.end["reason"], output.end["exit_code"]) == ("exited", 7)
    assert "limit of 64 processes" in output.end["message"]
    assert "was killed" in output.end["message"]
    children, error = output.stdout.split()
    assert int(children) < 64
    assert error == "11"
    _next_command_works(sandbox)


@pytest.mark.parametrize(
    "bomb",
    [
        ["bash", "-c", "f() { f | f & }; f; wait; sleep 1"],
        ["python3", "-c", "import os\nwhile True: os.fork()"],
        ["sh", "-c", "while :; do sleep 300 & done"],
    ],
    ids=["bash", "python", "sh"],
)
def test_a_fork_bomb_is_named_and_the_next_command_runs(new_sandbox: Create, bomb: list[str]) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "pids")
    # A shell may wait for a place for longer than anybody wants to: then its time limit ends it.
    end = sandbox.run(bomb, timeout=15_000).end
    # 64 interpreters that all print a traceback at once may also reach the limit of memory.
    assert end["reason"] in ("exited", "timed_out", "out_of_memory"), end
    assert "limit of 64 processes" in end["message"]
    _next_command_works(sandbox)


def test_servers_that_were_left_on_purpose_outlive_the_limit(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "pids")
    script = (
        "sleep 300 & echo $!\n"
        "(while :; do sleep 300 & echo $! >> /tmp/pids; done) 2>/dev/null\n"
        "while read pid; do kill $pid; done < /tmp/pids; exit 0"
    )
    output = sandbox.run(["sh", "-c", script])
    assert "limit of 64 processes" in output.end["message"]
    assert sandbox.run(f"kill -0 {int(output.stdout)} && echo alive").stdout == "alive"


def _next_command_works(sandbox: Sandbox) -> None:
    """At once, with more than one process, and without a word about what another command did."""
    assert sandbox.ping()
    start = time.perf_counter()
    output = sandbox.run("echo $(echo alive | cat)")
    assert output.stdout == "alive"
    assert time.perf_counter() - start < 3


def _runs(sandbox: Sandbox) -> bool:
    answer = sandbox.call("POST", "/command", body={"command": "true"})
    return answer.status == 200 and b"execution_complete" in answer.body


def test_an_endless_loop_in_one_leaves_another_alone(new_sandbox: Create) -> None:
    """Compared with itself: the same commands, with and without a neighbour that burns all it gets."""
    quiet, busy = new_sandbox(resourceLimits=SMALL), new_sandbox(resourceLimits=SMALL)
    limited(busy, "cpu")

    def latency() -> float:
        taken = []
        for _ in range(15):
            start = time.perf_counter()
            assert quiet.run("true").end["exit_code"] == 0
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    without = latency()
    loops = [busy.start("while :; do :; done") for _ in range(4)]
    until(lambda: busy.call("GET", "/metrics").expect(200).json()["cpu_used_pct"] > 0, "the loops burn")
    with_neighbour = latency()
    # Half a core is taken by the neighbour; four endless loops without a limit would take both.
    assert with_neighbour < without * 5 + 0.05, f"{without * 1000:.1f} ms alone, {with_neighbour * 1000:.1f} ms beside"
    for loop in loops:
        busy.call("DELETE", f"/command?id={loop}").expect(200)


def test_the_cpu_limit_is_kept(new_sandbox: Create) -> None:
    """By the processes' own clock: four of them together get about the half core that was asked for."""
    sandbox = new_sandbox(resourceLimits=SMALL)
    limited(sandbox, "cpu")
    script = (
        "import os, time, resource\n"
        "for _ in range(3):\n    if os.fork() == 0: break\n"
        "end = time.monotonic() + 1.5\n"
        "while time.monotonic() < end: pass\n"
        "try:\n    while True: os.wait()\nexcept ChildProcessError: pass\n"
        "used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
        "print(os.getpid(), used)\n"
    )
    used = max(float(line.split()[1]) for line in sandbox.python(script).stdout.splitlines())
    assert used < 1.5 * 0.5 * 1.6


def test_a_flood_of_output_is_bounded_and_execd_lives(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    flood = sandbox.start("yes | head -c 300000000")
    ended = sandbox.wait(flood, 120)
    assert ended["end"]["reason"] == "exited"
    assert ended["end"]["output_truncated"] is True
    assert sandbox.ping()


def test_a_flood_of_open_files_hits_a_limit(new_sandbox: Create) -> None:
    sandbox = new_sandbox(resourceLimits=SMALL)
    script = "import os\ntry:\n    while True: os.open('/dev/null', 0)\nexcept OSError as e: print(e.errno)\n"
    assert sandbox.python(script).stdout == "24"
    assert sandbox.ping()
