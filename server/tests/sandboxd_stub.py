#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A sandboxd that only answers: what the local runtime is tested against where no sandbox is needed.

What it knows is kept in a file beside its socket, so that a new one goes on where a killed one ended. `behaviour`
in that directory names a fault to show.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

ARGUMENTS = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
RUN = Path(ARGUMENTS["--run-dir"])
STATE = Path(ARGUMENTS["--state-dir"])


def behaviour() -> str:
    file = RUN / "behaviour"
    return file.read_text().strip() if file.exists() else ""


def known() -> dict[str, dict[str, object]]:
    file = RUN / "known.json"
    return json.loads(file.read_text()) if file.exists() else {}


def keep(reports: dict[str, dict[str, object]]) -> None:
    (RUN / "known.json").write_text(json.dumps(reports))


def error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"code": code, "message": message, "hint": "as the stub says"}, status=status)


async def version(_: web.Request) -> web.Response:
    instance = (STATE / "instance").read_text().strip()
    protocol = 99 if behaviour() == "future" else 1
    told = {"protocol": protocol, "version": "stub", "pid": os.getpid(), "instance": instance}
    if behaviour() != "old":
        place = Path("/") if behaviour() == "original" else STATE
        info = place.stat()
        told |= {"stateDir": str(place), "stateDevice": info.st_dev, "stateInode": info.st_ino}
    return web.json_response(told)


async def host(_: web.Request) -> web.Response:
    return web.json_response(
        {
            "rootless": False,
            "kernel": "6.18",
            "cgroup": "v1",
            "images": [{"name": "host", "description": "this machine"}],
            "missing": ["io limits"],
            "freeBytes": 1,
            "reserveBytes": 0,
        }
    )


async def launch(request: web.Request) -> web.Response:
    asked = await request.json()
    reports = known()
    if asked["image"] != "host":
        return error(404, "IMAGE::NOT_FOUND", f"There is no image {asked['image']}.")
    reports[asked["id"]] = {
        "id": asked["id"],
        "state": "running",
        "image": "host",
        "entrypoint": asked["entrypoint"],
        "generation": asked["generation"],
        "protocol": 1,
        "createdAt": "2026-11-15T18:05:34Z",
        "acknowledged": False,
    }
    keep(reports)
    if behaviour() == "die-in-launch":
        (RUN / "behaviour").unlink()
        os._exit(9)
    if behaviour() == "hang-in-launch":
        await asyncio.sleep(60)
    return web.json_response(reports[asked["id"]], status=201)


async def get(request: web.Request) -> web.Response:
    found = known().get(request.match_info["id"])
    return web.json_response(found) if found else error(404, "SANDBOX::NOT_FOUND", "There is none.")


async def remove(request: web.Request) -> web.Response:
    reports = known()
    if reports.pop(request.match_info["id"], None) is None:
        return error(404, "SANDBOX::NOT_FOUND", "There is none.")
    keep(reports)
    return web.Response(status=204)


async def listing(_: web.Request) -> web.Response:
    return web.json_response({"items": list(known().values())})


async def events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b'{"type":"hello"}\n')
    for report in known().values():
        if report["state"] == "ended":
            await response.write(json.dumps({"type": "ended", "report": report}).encode() + b"\n")
    await asyncio.Event().wait()
    return response


async def ingress(request: web.Request) -> web.Response:
    asked = await request.json()
    return web.json_response({"port": asked.get("port", 28888), "hosts": asked["hosts"], "pid": os.getpid()})


async def shutdown(request: web.Request) -> web.Response:
    if known() and (await request.json())["when"] == "idle":
        return error(409, "SANDBOX::NOT_RUNNING", "It holds sandboxes.")
    asyncio.get_running_loop().call_later(0.01, os._exit, 0)
    return web.Response(status=202)


async def main() -> None:
    if behaviour() == "refuse":
        told = {"code": "NODE::UNSUPPORTED_HOST", "message": "No user namespaces.", "hint": "sysctl -w it=1"}
        print(json.dumps({"error": told}), flush=True)
        sys.exit(1)
    if behaviour() == "crash":
        print("panic: out of luck", file=sys.stderr, flush=True)
        sys.exit(7)
    if behaviour() == "taken":
        (RUN / "behaviour").unlink()
        print(json.dumps({"error": {"code": "NODE::UNAVAILABLE", "message": "Another one runs."}}), flush=True)
        sys.exit(3)
    app = web.Application()
    app.router.add_get("/version", version)
    app.router.add_get("/host", host)
    app.router.add_post("/sandboxes", launch)
    app.router.add_get("/sandboxes", listing)
    app.router.add_get("/sandboxes/{id}", get)
    app.router.add_delete("/sandboxes/{id}", remove)
    app.router.add_get("/events", events)
    app.router.add_put("/ingress", ingress)
    app.router.add_post("/shutdown", shutdown)
    runner = web.AppRunner(app)
    await runner.setup()
    (RUN / "sandboxd.sock").unlink(missing_ok=True)
    await web.UnixSite(runner, str(RUN / "sandboxd.sock")).start()
    with (RUN / "pids").open("a") as pids:
        pids.write(f"{os.getpid()}\n")
    print(json.dumps({"ready": True, "socket": str(RUN / "sandboxd.sock")}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
