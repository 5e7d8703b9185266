# SPDX-License-Identifier: Apache-2.0
"""The local runtime against a stub of sandboxd: finding it, starting it, outliving it, undoing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.ports import LaunchSpec, Runtime
from opensandbox_server.runtimes.local import plan
from opensandbox_server.runtimes.local.runtime import LocalRuntime
from opensandbox_server.sandbox import Limits
from opensandbox_server.statedir import open_state

STUB = Path(__file__).with_name("sandboxd_stub.py")
SPEC = LaunchSpec(
    id="6f1c9a52-0000-4000-8000-000000000001",
    image="host",
    entrypoint=("sleep", "infinity"),
    env={},
    limits=Limits(),
    generation=1,
    token_sha256="ab" * 32,
)

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("no_blocking")]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def settings(tmp_path: Path) -> Iterator[plan.Settings]:
    state = open_state(tmp_path / "state")
    program = tmp_path / "sandboxd"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STUB} "$@"\n')
    program.chmod(0o755)
    # Not in tmp_path: its name grows with the test's, and a socket's path has 107 bytes.
    run = Path(tempfile.mkdtemp(prefix="osb-"))
    yield plan.Settings(
        state_dir=state.path, run_dir=run, instance=state.instance, sandboxd=program, ingress=tmp_path / "ingress"
    )
    for pid in _pids(run):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(run)


@pytest.fixture
async def runtime(settings: plan.Settings) -> AsyncIterator[LocalRuntime]:
    made = LocalRuntime(settings)
    await made.start()
    yield made
    await made.stop()


def _pids(run: Path) -> list[int]:
    file = run / "pids"
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def behave(settings: plan.Settings, fault: str) -> None:
    (settings.run_dir / "behaviour").write_text(fault)


async def killed(settings: plan.Settings) -> int:
    """Kill the newest stub and wait until it is gone, as its parent's reaper thread sees it."""
    pid = _pids(settings.run_dir)[-1]
    pidfd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, gone.set)
    await asyncio.wait_for(gone.wait(), 10)
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)
    return pid


async def test_it_is_a_runtime(runtime: LocalRuntime) -> None:
    assert isinstance(runtime, Runtime)


async def test_a_missing_sandboxd_is_started_and_found_again(settings: plan.Settings, runtime: LocalRuntime) -> None:
    await runtime.create(SPEC)
    second = LocalRuntime(settings)
    await second.start()
    assert [report.id for report in await second.list()] == [SPEC.id]
    assert len(_pids(settings.run_dir)) == 1
    await second.stop()
    assert [report.id for report in await runtime.list()] == [SPEC.id]
    await runtime.delete(SPEC.id)


async def test_it_runs_in_a_session_of_its_own_with_nothing_of_ours(
    settings: plan.Settings, runtime: LocalRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    proc = Path("/proc") / str(_pids(settings.run_dir)[-1])
    assert os.getsid(int(proc.name)) == int(proc.name)
    assert os.readlink(proc / "cwd") == "/"
    environ = (proc / "environ").read_bytes().rstrip(b"\0").split(b"\0")
    assert {entry.split(b"=")[0] for entry in environ} <= {b"PATH", b"PWD", b"SHLVL", b"_", b"OLDPWD"}
    open_files = [os.readlink(entry) for entry in (proc / "fd").iterdir()]
    assert not [name for name in open_files if name.endswith((".db", ".lock"))]


async def test_public_address(settings: plan.Settings, runtime: LocalRuntime) -> None:
    assert runtime.public_address() == "127.0.0.1:28888"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("refuse", "No user namespaces."),
        ("crash", "ended at once with code 7: panic: out of luck"),
        ("future", "speaks protocol 99"),
    ],
)
async def test_a_sandboxd_that_cannot_is_told_in_its_own_words(
    settings: plan.Settings, fault: str, expected: str
) -> None:
    behave(settings, fault)
    with pytest.raises(OpenSandboxError) as caught:
        await LocalRuntime(settings).start()
    assert expected in caught.value.message
    assert caught.value.hint


async def test_one_that_another_server_is_starting_is_waited_for(settings: plan.Settings) -> None:
    """The lock on the state directory is taken, and the socket is not there yet."""
    behave(settings, "taken")
    first, second = LocalRuntime(settings), LocalRuntime(settings)
    waiting = asyncio.create_task(first.start())
    while (settings.run_dir / "behaviour").exists():
        assert not waiting.done()
        await asyncio.sleep(0.01)
    await second.start()
    await asyncio.wait_for(waiting, 20)
    assert len(_pids(settings.run_dir)) == 1
    await second.stop()
    await first.stop()


async def test_a_missing_binary_is_named(settings: plan.Settings) -> None:
    with pytest.raises(OpenSandboxError, match="binary is missing"):
        await LocalRuntime(replace(settings, sandboxd=Path("/absent/sandboxd"))).start()


async def test_full_isolation_can_be_demanded(settings: plan.Settings) -> None:
    with pytest.raises(OpenSandboxError, match="io limits"):
        await LocalRuntime(replace(settings, require_full_isolation=True)).start()


async def test_an_unknown_image_is_answered_with_what_is_there(runtime: LocalRuntime) -> None:
    with pytest.raises(OpenSandboxError, match=r"host \(this machine\)") as caught:
        await runtime.create(replace(SPEC, image="redis"))
    assert caught.value.code is Code.IMAGE_NOT_FOUND


@pytest.mark.parametrize("limits", [Limits(cpu_millis=1), Limits(memory_bytes=1024), Limits(pids=1)])
async def test_limits_no_sandbox_starts_with_are_refused_before(runtime: LocalRuntime, limits: Limits) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        await runtime.check(replace(SPEC, limits=limits))
    assert caught.value.code is Code.SANDBOX_INVALID_PARAMETER


async def test_isolated_runs_are_refused_where_sandboxes_have_one_user(runtime: LocalRuntime) -> None:
    spec = replace(SPEC, isolates=True)
    await runtime.check(spec)
    assert runtime.host is not None
    runtime.host = runtime.host.model_copy(update={"rootless": True})
    await runtime.check(SPEC)
    with pytest.raises(OpenSandboxError, match=r"bootstrap\.execd\.isolation") as caught:
        await runtime.check(spec)
    assert caught.value.code is Code.SANDBOX_API_NOT_SUPPORTED
    assert "as root" in (caught.value.hint or "")


async def test_a_killed_sandboxd_is_started_again_by_the_next_call(
    settings: plan.Settings, runtime: LocalRuntime
) -> None:
    await runtime.create(SPEC)
    before = await killed(settings)
    assert [report.id for report in await runtime.list()] == [SPEC.id]
    assert _pids(settings.run_dir)[-1] != before


async def test_a_create_that_sandboxd_dies_in_leaves_nothing(settings: plan.Settings, runtime: LocalRuntime) -> None:
    behave(settings, "die-in-launch")
    with pytest.raises(OpenSandboxError) as caught:
        await runtime.create(SPEC)
    assert caught.value.code is Code.NODE_UNAVAILABLE
    assert await runtime.list() == []


async def test_a_create_that_is_given_up_leaves_nothing(settings: plan.Settings, runtime: LocalRuntime) -> None:
    behave(settings, "hang-in-launch")
    creating = asyncio.create_task(runtime.create(SPEC))
    while not await runtime.list():  # noqa: ASYNC110 - the stub runs elsewhere and tells nobody
        await asyncio.sleep(0)
    creating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert await runtime.list() == []


async def test_deleting_and_acknowledging_what_is_not_there_is_fine(runtime: LocalRuntime) -> None:
    await runtime.delete(SPEC.id)
    assert await runtime.inspect(SPEC.id) is None


async def test_the_watch_survives_sandboxd(settings: plan.Settings, runtime: LocalRuntime) -> None:
    await runtime.create(SPEC)
    watch = runtime.watch()
    first = asyncio.ensure_future(anext(watch))
    done, _ = await asyncio.wait([first], timeout=0.2)
    assert not done
    file = settings.run_dir / "known.json"
    file.write_text(
        file.read_text().replace(
            '"state": "running"',
            '"state": "ended", "end": {"reason": "exited", "exitCode": 0, "at": "2026-11-15T18:05:34Z"}',
        )
    )
    await killed(settings)
    report = await asyncio.wait_for(first, 10)
    assert report.id == SPEC.id
    assert report.end is not None
    await watch.aclose()


async def test_a_sandboxd_of_the_directory_that_ours_is_a_copy_of_is_left_alone(
    settings: plan.Settings, runtime: LocalRuntime
) -> None:
    await runtime.create(SPEC)
    behave(settings, "original")
    with pytest.raises(OpenSandboxError, match=f"{settings.state_dir} is a copy of /, whose sandboxd runs") as caught:
        await LocalRuntime(settings).start()
    assert "--state-dir /)" in caught.value.hint
    behave(settings, "old")  # one that does not say where it works is trusted, as before
    second = LocalRuntime(settings)
    await second.start()
    assert [report.id for report in await second.list()] == [SPEC.id]
    await second.delete(SPEC.id)
    await second.stop()
