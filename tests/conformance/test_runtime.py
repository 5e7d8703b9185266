# SPDX-License-Identifier: Apache-2.0
"""What every runtime must do: each behaviour a named test, run for each of them."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime, timedelta

import pytest

from conformance.runtimes import Bench
from live_server import until
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.executions import parse
from opensandbox_server.ports import ABILITIES, Remains, Runtime
from opensandbox_server.sandbox import EndReason, Limits

pytestmark = pytest.mark.anyio


async def test_it_satisfies_the_port(bench: Bench) -> None:
    assert isinstance(bench.runtime, Runtime)
    assert bench.runtime.name
    host, _, port = bench.runtime.public_address().rpartition(":")
    assert host
    assert 0 < int(port) < 65536


async def test_a_created_sandbox_runs(bench: Bench) -> None:
    report = await bench.create()
    assert report.running
    assert report.end is None
    assert report.generation == 1
    assert report.isolation["runtime"] == bench.runtime.name


async def test_create_says_where_the_time_went(real_bench: Bench) -> None:
    report = await real_bench.create()
    assert report.timings
    assert all(taken >= 0 for taken in report.timings.values())


async def test_the_first_command_works_when_create_answers(real_bench: Bench) -> None:
    report = await real_bench.create(env={"GREETING": "hello"})
    output = await asyncio.to_thread(real_bench.execd(report.id).run, 'echo "$GREETING from $(id -un)"; exit 3')
    assert output.stdout == "hello from root"
    assert output.end | {"reason": "exited", "exit_code": 3} == output.end


async def test_commands_need_the_token(real_bench: Bench) -> None:
    report = await real_bench.create()
    execd = real_bench.execd(report.id)
    execd.headers.clear()
    answer = await asyncio.to_thread(execd.call, "POST", "/command", body={"command": "true"})
    assert answer.status == 401


async def test_an_entry_point_that_succeeds_at_once_ends_the_sandbox_cleanly(bench: Bench) -> None:
    made = await bench.create("true")
    end = (await bench.end_of(made.id)).end
    assert end is not None
    assert (end.reason, end.exit_code, end.clean) == (EndReason.EXITED, 0, True)
    assert end.at <= datetime.now(UTC) + timedelta(seconds=1)


async def test_an_entry_point_that_fails_at_once_ends_it_with_its_exit_code(bench: Bench) -> None:
    made = await bench.create("sh", "-c", "exit 3")
    end = (await bench.end_of(made.id)).end
    assert end is not None
    assert (end.reason, end.exit_code, end.clean) == (EndReason.EXITED, 3, False)


async def test_an_entry_point_killed_by_a_signal_says_which(real_bench: Bench) -> None:
    made = await real_bench.create("sh", "-c", "kill -TERM $$")
    end = (await real_bench.end_of(made.id)).end
    assert end is not None
    assert (end.reason, end.signal, end.clean) == (EndReason.SIGNALLED, "SIGTERM", False)


async def test_an_entry_point_that_does_not_exist_is_refused_and_leaves_nothing(real_bench: Bench) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        await real_bench.create("/no/such/program")
    assert caught.value.code is Code.SANDBOX_INVALID_ENTRYPOINT
    assert await real_bench.runtime.list() == []


async def test_an_unknown_image_is_refused_with_a_list_of_what_is_there(bench: Bench) -> None:
    spec = bench.spec(image="no/such-image:v9")
    with pytest.raises(OpenSandboxError) as caught:
        await bench.runtime.create(spec)
    assert caught.value.code is Code.IMAGE_NOT_FOUND
    assert "host" in caught.value.message
    assert "no/such-image:v9" in caught.value.message
    assert await bench.runtime.list() == []


@pytest.mark.parametrize(
    "image",
    [
        "host",
        "opensandbox/code-interpreter",
        "opensandbox/code-interpreter:v1.0.2",
        "docker.io/opensandbox/code-interpreter:latest",
    ],
)
async def test_published_image_names_are_there(real_bench: Bench, image: str) -> None:
    for entrypoint in ("/opt/opensandbox/code-interpreter.sh", "/opt/code-interpreter/code-interpreter.sh"):
        report = await real_bench.create(entrypoint, image=image)
        assert report.running
        assert report.image


async def test_delete_ends_it_and_a_second_delete_is_fine(bench: Bench) -> None:
    made = await bench.create()
    await bench.runtime.delete(made.id)
    assert await bench.runtime.inspect(made.id) is None
    await bench.runtime.delete(made.id)
    await bench.runtime.delete(str(uuid.uuid4()))


async def test_an_ended_sandbox_can_be_deleted(bench: Bench) -> None:
    made = await bench.create("true")
    await bench.end_of(made.id)
    await bench.runtime.delete(made.id)
    assert await bench.runtime.inspect(made.id) is None


async def test_list_and_inspect_tell_the_same(bench: Bench) -> None:
    one, two = await bench.create(), await bench.create()
    listed = {report.id: report for report in await bench.runtime.list()}
    assert set(listed) == {one.id, two.id}
    assert await bench.runtime.inspect(one.id) == listed[one.id]
    assert await bench.runtime.inspect(str(uuid.uuid4())) is None


async def test_ended_ones_stay_in_the_list_until_they_are_deleted(bench: Bench) -> None:
    made = await bench.create("true")
    await bench.end_of(made.id)
    assert [report.id for report in await bench.runtime.list()] == [made.id]


async def test_the_watch_tells_an_end_until_it_is_acknowledged(bench: Bench) -> None:
    made = await bench.create("true")
    told = await bench.end_of(made.id)
    assert not told.acknowledged
    watch = bench.runtime.watch()
    again = await asyncio.wait_for(anext(watch), 30)
    assert again.id == made.id
    await watch.aclose()  # type: ignore[attr-defined]
    await bench.runtime.acknowledge(made.id)
    known = await bench.runtime.inspect(made.id)
    assert known is not None
    assert known.acknowledged
    other = await bench.create("true")
    watch = bench.runtime.watch()
    first = await asyncio.wait_for(anext(watch), 30)
    assert first.id == other.id
    await watch.aclose()  # type: ignore[attr-defined]


async def test_the_watch_tells_ends_as_they_happen(real_bench: Bench) -> None:
    made = await real_bench.create("sh", "-c", "until [ -e /tmp/end ]; do sleep 0.05; done; exit 5")
    watch = real_bench.runtime.watch()
    told = asyncio.ensure_future(anext(watch))
    await asyncio.to_thread(real_bench.execd(made.id).run, "touch /tmp/end")
    report = await asyncio.wait_for(told, 30)
    assert report.id == made.id
    assert report.end is not None
    assert report.end.exit_code == 5
    await watch.aclose()  # type: ignore[attr-defined]


async def test_acknowledging_what_is_gone_is_fine(bench: Bench) -> None:
    await bench.runtime.acknowledge(str(uuid.uuid4()))


async def test_a_deadline_can_be_set_moved_and_taken_away(bench: Bench) -> None:
    made = await bench.create()
    soon = datetime.now(UTC) + timedelta(hours=1)
    await bench.runtime.set_deadline(made.id, soon)
    await bench.runtime.set_deadline(made.id, soon + timedelta(hours=1))
    await bench.runtime.set_deadline(made.id, None)
    known = await bench.runtime.inspect(made.id)
    assert known is not None
    assert known.running


async def test_limits_are_what_isolation_says_and_what_the_kernel_enforces(real_bench: Bench) -> None:
    made = await real_bench.create(limits=Limits(cpu_millis=500, memory_bytes=256 << 20, pids=40))
    told = made.isolation["limits"]
    assert {name: told[name]["means"] for name in ("cpu", "memory", "pids")}.keys() == {"cpu", "memory", "pids"}
    if told["memory"]["means"] == "none":
        pytest.skip(f"this host enforces no limits: {made.isolation.get('missing')}")
    metrics = (await asyncio.to_thread(real_bench.execd(made.id).call, "GET", "/metrics")).json()
    assert metrics["mem_total_mib"] == 256
    assert metrics["cpu_count"] == 0.5
    # Less than 40 forks succeed, and execd, which has a group of its own, answers on.
    script = (
        "import os, signal\nn = 0\ntry:\n    while os.fork(): n += 1\n    os.close(1); os.close(2); signal.pause()\n"
        "except OSError: print(n)\n"
    )
    output = await asyncio.to_thread(real_bench.execd(made.id).python, script)
    assert 20 < int(output.stdout) < 40
    assert await asyncio.to_thread(real_bench.execd(made.id).ping)


async def test_isolation_says_what_is_not_enforced(real_bench: Bench) -> None:
    made = await real_bench.create()
    assert made.isolation["limits"]["disk"]["means"] == "none"
    assert "loopback" in made.isolation["network"]["means"]
    assert set(made.isolation["namespaces"]) >= {"user", "mount", "pid", "ipc", "uts", "network"}
    assert made.isolation["noNewPrivileges"] is True


async def test_the_output_of_the_entry_point_is_kept(real_bench: Bench) -> None:
    made = await real_bench.create("sh", "-c", "echo to-out; echo to-err >&2; printf '\\377'; exit 0")
    await real_bench.end_of(made.id)
    output = await real_bench.runtime.output(made.id)
    assert b"to-out" in output
    assert b"to-err" in output
    assert b"\xff" in output


async def test_the_journal_tells_what_ran_and_stays_after_the_end(real_bench: Bench) -> None:
    made = await real_bench.create("sh", "-c", "until [ -e /tmp/end ]; do sleep 0.05; done")
    execd = real_bench.execd(made.id)
    await asyncio.to_thread(execd.run, "echo of-a-command; exit 3")
    ran = [one for one in parse(await real_bench.runtime.journal(made.id)) if "of-a-command" in one.content]
    assert [(one.running, one.exit_code) for one in ran] == [(False, 3)]
    await asyncio.to_thread(execd.start, "touch /tmp/end")
    await real_bench.end_of(made.id)
    kept = parse(await real_bench.runtime.journal(made.id))
    assert [one for one in kept if "of-a-command" in one.content] == ran


async def test_there_is_no_journal_of_what_is_not_there(bench: Bench) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        await bench.runtime.journal(str(uuid.uuid4()))
    assert caught.value.code is Code.SANDBOX_NOT_FOUND
    made = await bench.create()
    assert not parse(await bench.runtime.journal(made.id))


async def test_a_delete_tells_what_is_left(bench: Bench) -> None:
    living, ended = await bench.create(), await bench.create("sh", "-c", "exit 3")
    await bench.end_of(ended.id)
    left = await bench.runtime.delete(living.id)
    assert left.end is not None
    assert left.end.reason is EndReason.KILLED
    left = await bench.runtime.delete(ended.id)
    assert left.end is not None
    assert left.end.exit_code == 3
    assert await bench.runtime.delete(ended.id) == Remains()


async def test_what_is_left_has_the_last_words_and_the_journal(real_bench: Bench) -> None:
    made = await real_bench.create("sh", "-c", "echo first-words; exec sleep infinity")
    await asyncio.to_thread(real_bench.execd(made.id).run, "echo of-a-command")
    left = await real_bench.runtime.delete(made.id)
    assert left.output == b"first-words\n"
    assert [one.exit_code for one in parse(left.journal)] == [0]
    assert left.end is not None
    assert left.end.peak_memory_bytes


async def test_it_describes_itself(bench: Bench) -> None:
    told = await bench.runtime.describe()
    assert told.name == bench.runtime.name
    assert told.version
    assert set(told.abilities) == set(ABILITIES)
    assert {image["name"] for image in told.images} >= {"host"}


async def test_a_new_runtime_object_finds_the_sandboxes_of_the_old_one(real_bench: Bench) -> None:
    made = await real_bench.create()
    execd = real_bench.execd(made.id)
    command = await asyncio.to_thread(execd.start, "for i in 1 2 3; do echo $i; sleep 0.2; done")
    second = real_bench.reopen()
    await second.start()
    known = await second.inspect(made.id)
    assert known is not None
    assert known.running
    await second.stop()
    ended = await asyncio.to_thread(execd.wait, command)
    assert ended["exit_code"] == 0
    assert await asyncio.to_thread(execd.logs, command) == b"1\n2\n3\n"


async def test_sandboxes_do_not_see_each_other(real_bench: Bench) -> None:
    one, two = await real_bench.create(), await real_bench.create()
    await asyncio.to_thread(real_bench.execd(one.id).write, "/tmp/mine", b"secret")
    output = await asyncio.to_thread(real_bench.execd(two.id).run, "cat /tmp/mine; ls /proc | grep -c '^[0-9]'")
    assert "secret" not in output.stdout
    assert int(output.stdout.splitlines()[-1]) < 10


async def test_many_at_once(bench: Bench) -> None:
    made = await asyncio.gather(*(bench.create() for _ in range(12)))
    assert all(report.running for report in made)
    assert len({report.id for report in made}) == 12
    await asyncio.gather(*(bench.runtime.delete(report.id) for report in made))
    assert await bench.runtime.list() == []


async def test_a_port_inside_is_reached_through_its_socket(real_bench: Bench) -> None:
    made = await real_bench.create()
    execd = real_bench.execd(made.id)
    script = (
        "import socket\ns = socket.create_server(('127.0.0.1', 8000))\nprint('up', flush=True)\n"
        "c, _ = s.accept()\nc.sendall(b'got ' + c.recv(100))\n"
    )
    await asyncio.to_thread(execd.write, "/tmp/server.py", script.encode())
    command = await asyncio.to_thread(execd.start, "python3 /tmp/server.py")
    await asyncio.to_thread(until, lambda: b"up" in execd.logs(command), "the server inside listens")
    address = real_bench.runtime.address(made.id, 8000)
    assert address.kind == "ports"
    reader, writer = await asyncio.open_unix_connection(address.socket)
    writer.write(b"CONNECT 8000\n")
    assert await asyncio.wait_for(reader.readline(), 10) == b"OK\n"
    writer.write(b"hello")
    assert await asyncio.wait_for(reader.read(100), 10) == b"got hello"
    writer.close()
    reader, writer = await asyncio.open_unix_connection(address.socket)
    writer.write(b"CONNECT 8001\n")
    assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"ERR ")
    writer.close()
