# SPDX-License-Identifier: Apache-2.0
"""Listening, and naming who listens already."""

from __future__ import annotations

import os
import socket

import pytest

from opensandbox_server import serve
from opensandbox_server.config import Server
from opensandbox_server.errors import CannotStart


def test_both_loopback_addresses_get_one_port() -> None:
    sockets = serve.bind(("127.0.0.1", "::1"), 0)
    try:
        assert len({bound.getsockname()[1] for bound in sockets}) == 1
        assert sockets[0].getsockname()[0] == "127.0.0.1"
        assert serve.url(sockets) == f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    finally:
        for bound in sockets:
            bound.close()


@pytest.mark.parametrize("taken_on", ["127.0.0.1", "::1"])
def test_a_taken_port_names_its_holder_and_a_port_to_try(taken_on: str) -> None:
    family = socket.AF_INET6 if ":" in taken_on else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as holder:
        holder.bind((taken_on, 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(CannotStart) as caught:
            serve.bind(("127.0.0.1", "::1"), port)
    assert f"(pid {os.getpid()})" in caught.value.message
    assert "--port" in caught.value.hint


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(CannotStart, match=r"192\.0\.2\.1"):
        serve.bind(("192.0.2.1",), 0)


def test_a_name_without_address_is_refused() -> None:
    with pytest.raises(CannotStart, match="has no address"):
        serve.bind(("sandbox.invalid",), 0)


def test_our_own_server_is_recognised() -> None:
    assert serve.PortHolder(1, "python", ("/x/python", "/x/.venv/bin/opensandbox-server")).ours
    assert serve.PortHolder(1, "python", ("python", "-m", "opensandbox_server")).ours
    assert not serve.PortHolder(1, "nginx", ("nginx: master",)).ours


def test_what_clients_are_told_to_connect_to() -> None:
    assert serve.public_host(Server()) == "127.0.0.1"
    assert serve.public_host(Server(host="192.0.2.7")) == "192.0.2.7"
    assert serve.public_host(Server(host="0.0.0.0", eip="box.example")) == "box.example"
    assert serve.public_host(Server(host="0.0.0.0")) != "0.0.0.0"
