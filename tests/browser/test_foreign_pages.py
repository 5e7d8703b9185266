# SPDX-License-Identifier: Apache-2.0
"""What a web page must not be able to do to the server and the sandboxes of this machine.

The page tries, and the assertions look at the server's side: what was made, deleted or run. That a browser hides an
answer proves nothing about what the request did.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from chromium import Page
from website import Website

from live_server import LiveServer

WAYS = ["path", "host", "proxy"]
# Tries each attempt and tells what the page got to see of it.
TRY = """
    const tried = async attempt => {
        try {
            const answer = await attempt();
            return answer.type === "opaque" ? "hidden" : answer.status + " " + (await answer.text());
        } catch (error) { return "failed" }
    };
    const submit = (action, name, value) => new Promise(done => {
        const frame = document.createElement("iframe");
        frame.name = "f" + Math.random();
        document.body.append(frame);
        const form = document.createElement("form");
        Object.assign(form, {method: "POST", action, target: frame.name, enctype: "text/plain"});
        const field = document.createElement("input");
        Object.assign(field, {name, value});
        form.append(field);
        document.body.append(form);
        frame.onload = () => done("sent");
        form.submit();
        setTimeout(() => done("sent"), 2000);
    });
    const dial = address => new Promise(done => {
        const socket = new WebSocket(address);
        socket.onopen = () => { socket.send("hello"); };
        socket.onmessage = () => done("opened");
        socket.onclose = () => done("failed");
    });
"""
BODY = '{"image": {"uri": "host"}, "entrypoint": ["sleep", "60"], "resourceLimits": {}}'


def attack_the_api(page: Page, server: LiveServer, site: Website) -> list[str]:
    return list(
        page.run(
            TRY
            + """
            const all = api + "/v1/sandboxes", one = all + "/" + id;
            return [
                await tried(() => fetch(all)),
                await tried(() => fetch(all, {mode: "no-cors"})),
                await tried(() => fetch(all, {method: "POST", body, headers: {"Content-Type": "application/json"}})),
                await tried(() => fetch(all, {method: "POST", body, mode: "no-cors"})),
                await tried(() => fetch(all, {method: "POST", body, mode: "no-cors", credentials: "include"})),
                await tried(() => fetch(one, {method: "DELETE"})),
                await tried(() => fetch(one + "/renew-expiration", {method: "POST", body: "{}", mode: "no-cors"})),
                await tried(async () => {
                    if (!navigator.sendBeacon(all, body)) throw 0;
                    return new Response("", {status: 299});
                }),
                await submit(all, body.slice(0, -1) + ', "metadata": {"x": "', '"}}'),
                await dial(all.replace("http", "ws")),
                await dial(one.replace("http", "ws") + "/proxy/8000/echo"),
            ];
            """,
            api=server.url,
            id=site.sandbox.id,
            body=BODY,
        )
    )


def attack_execd(page: Page, base: str, headers: dict[str, str], marker: str) -> list[str]:
    """Even with the token, which no page can know."""
    return list(
        page.run(
            TRY
            + """
            const body = JSON.stringify({command: "touch " + marker});
            return [
                await tried(() => fetch(base + "/command", {method: "POST", body, headers})),
                await tried(() => fetch(base + "/command", {method: "POST", body, headers, mode: "no-cors"})),
                await tried(() => fetch(base + "/command", {method: "POST", body, mode: "no-cors"})),
                await tried(() => fetch(base + "/files/download?path=/etc/passwd", {headers})),
                await submit(base + "/command", body.slice(0, -1) + ', "x": "', '"}'),
                await dial(base.replace("http", "ws") + "/ping"),
            ];
            """,
            base=base,
            headers=headers,
            marker=marker,
        )
    )


def seen(outcomes: list[str]) -> list[str]:
    """The outcomes in which a page was shown something."""
    return [outcome for outcome in outcomes if outcome not in ("failed", "hidden", "sent", "299 ")]


def test_a_page_from_elsewhere_cannot_use_the_api(
    page: Page, elsewhere: str, server: LiveServer, site: Website, untouched: Callable[[], None]
) -> None:
    arrived = len(site.log())
    page.open(elsewhere)
    assert seen(attack_the_api(page, server, site)) == []
    untouched()
    assert site.log()[arrived:] == []


@pytest.mark.parametrize("way", WAYS)
def test_a_page_of_a_sandbox_cannot_use_the_api(
    page: Page, server: LiveServer, site: Website, neighbour: Website, way: str, untouched: Callable[[], None]
) -> None:
    arrived = len(neighbour.log())
    page.open(site.at(way))
    assert seen(attack_the_api(page, server, neighbour)) == []
    untouched()
    assert neighbour.log()[arrived:] == []


@pytest.mark.parametrize("by", ["path", "host", "proxy"])
def test_a_page_from_elsewhere_cannot_drive_execd(page: Page, elsewhere: str, site: Website, by: str) -> None:
    sandbox = site.sandbox
    base = {
        "path": f"http://{sandbox.address}{sandbox.prefix}",
        "host": f"http://{sandbox.id}-44772.localhost:{sandbox.address.rpartition(':')[2]}",
        "proxy": f"{site.server.url}/v1/sandboxes/{sandbox.id}/proxy/44772",
    }[by]
    page.open(elsewhere)
    assert seen(attack_execd(page, base, sandbox.headers, f"/tmp/driven-{by}")) == []
    assert sandbox.run(f"test -e /tmp/driven-{by}").exit_code == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_page_of_a_sandbox_cannot_drive_execd(page: Page, site: Website, neighbour: Website, way: str) -> None:
    sandbox = neighbour.sandbox
    page.open(site.at(way))
    for base in (
        f"http://{sandbox.address}{sandbox.prefix}",
        f"{site.server.url}/v1/sandboxes/{sandbox.id}/proxy/44772",
    ):
        assert seen(attack_execd(page, base, sandbox.headers, f"/tmp/driven-by-{way}")) == []
    assert sandbox.run(f"test -e /tmp/driven-by-{way}").exit_code == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_page_of_one_sandbox_cannot_read_another(page: Page, site: Website, neighbour: Website, way: str) -> None:
    page.open(neighbour.at(way) + "bake")
    page.open(site.at(way) + "seen")
    assert page.text == "cookies: none"
    page.open(site.at(way))
    told = page.run(
        TRY
        + """
        const framed = await new Promise(done => {
            const frame = document.createElement("iframe");
            frame.src = other + "secret";
            frame.onload = () => {
                try { done(frame.contentDocument ? frame.contentDocument.body.innerText : "failed") }
                catch (error) { done("failed") }
            };
            document.body.append(frame);
        });
        let cookies = "failed";
        try { cookies = document.cookie || "failed" } catch (error) {}
        let opened = "failed";
        try { opened = window.open(other + "secret").document.body.innerText || "failed" } catch (error) {}
        return [
            framed, cookies, opened,
            await tried(() => fetch(other + "secret")),
            await tried(() => fetch(other + "secret", {mode: "no-cors", credentials: "include"})),
        ];
        """,
        other=neighbour.at(way),
    )
    assert seen(told) == []
    assert neighbour.secret not in str(told)
    # The attempt was a real one: a person who goes there sees it.
    page.open(neighbour.at(way) + "secret")
    assert page.text == neighbour.secret
