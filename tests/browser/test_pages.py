# SPDX-License-Identifier: Apache-2.0
"""Web sites in sandboxes work in a real browser, by every way that leads to them."""

from __future__ import annotations

import pytest
from chromium import Page
from website import Website

WAYS = ["path", "host", "proxy"]

ECHO = """
    return await new Promise(done => {
        const socket = new WebSocket(address.replace("http", "ws") + "echo");
        socket.onopen = () => socket.send("hello");
        socket.onmessage = event => { socket.close(); done(event.data) };
        socket.onerror = () => done("refused");
    });
"""


@pytest.mark.parametrize("way", WAYS)
def test_a_page_loads_and_its_script_runs(page: Page, site: Website, way: str) -> None:
    page.open(site.at(way))
    assert page.run("return document.title") == "ran"
    assert "the script ran" in page.text
    assert page.picture().startswith(b"\x89PNG")


@pytest.mark.parametrize("way", WAYS)
def test_a_redirect_stays_inside(page: Page, site: Website, way: str) -> None:
    page.open(site.at(way) + "go")
    assert page.address == site.at(way) + "there"
    assert page.text == "you are at /there"


@pytest.mark.parametrize("way", WAYS)
def test_a_cookie_comes_back(page: Page, site: Website, way: str) -> None:
    page.open(site.at(way) + "seen")
    assert page.text == "cookies: none"
    page.open(site.at(way) + "bake")
    page.open(site.at(way) + "seen")
    assert page.text == "cookies: flavour=chocolate"


@pytest.mark.parametrize("way", ["path", "host"])
def test_a_websocket_echoes(page: Page, site: Website, way: str) -> None:
    page.open(site.at(way))
    assert page.run(ECHO, address=site.at(way)) == "HELLO"


def test_through_the_server_a_page_has_no_origin_and_so_no_websocket(page: Page, site: Website) -> None:
    """Without a key the server cannot tell this page from any other sandboxed page in the world."""
    before = len(site.log())
    page.open(site.proxy)
    assert page.run(ECHO, address=site.proxy) == "refused"
    assert "GET /echo" not in site.log()[before:]


def test_through_the_server_with_pages_on_its_origin(page: Page, same_origin_site: Website) -> None:
    page.open(same_origin_site.proxy)
    assert "the script ran" in page.text
    assert page.run(ECHO, address=same_origin_site.proxy) == "HELLO"
    assert page.run("return (await fetch('there')).text()") == "you are at /there"
