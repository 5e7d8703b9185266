# SPDX-License-Identifier: Apache-2.0
"""Files of a real sandbox: with its own users, few capabilities and a filter on system calls."""

from __future__ import annotations

import http.client
import io
import json
import tarfile
from collections.abc import Iterator

import pytest

from live_server import LiveServer, Sandbox

SOMEBODY = "/v1/filesystem/1000/1000"


@pytest.fixture(scope="module")
def sandbox(server: LiveServer) -> Iterator[Sandbox]:
    made = server.create()
    yield made
    server.delete(made.id)


def test_another_user_is_squashed(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -m 777 /tmp/open; printf precious > /tmp/open/secret; chmod 600 /tmp/open/secret")
    refused = sandbox.call("GET", f"{SOMEBODY}/files/download?path=/tmp/open/secret").expect(400)
    assert b"precious" not in refused.body
    sandbox.call("PUT", f"{SOMEBODY}/files/content?path=/tmp/open/secret", body=b"evil").expect(400)
    sandbox.call("PUT", f"{SOMEBODY}/files/content?path=/tmp/open/mine", body=b"text").expect(200)
    told = sandbox.run("stat -c '%u:%g %a' /tmp/open/mine; cat /tmp/open/secret").stdout
    assert told.split() == ["1000:1000", "644", "precious"]


def test_the_host_name_is_a_file(sandbox: Sandbox) -> None:
    told = sandbox.call("GET", "/files/download?path=/etc/hostname").expect(200).body.decode()
    assert told == sandbox.run("hostname").stdout + "\n"
    assert len(told) == 13


def test_a_tree_goes_there_and_back(sandbox: Sandbox) -> None:
    sandbox.run("mkdir -p /tmp/tree/empty; cd /tmp/tree; echo x > f; ln f h; ln -s f l; chown -h 1000:1000 l")
    archive = sandbox.call("GET", "/files/tar?path=/tmp/tree&gzip=true").expect(200).body
    with tarfile.open(fileobj=io.BytesIO(archive)) as members:
        assert sorted(members.getnames()) == [".", "empty", "f", "h", "l"]
    sandbox.call("POST", "/files/tar?path=/tmp/copy", body=archive).expect(200)
    look = "cd {} && find . -printf '%P %y %m %U %G %T@ %l\n' | sort && stat -c %h f"
    assert sandbox.run(look.format("/tmp/copy")).stdout == sandbox.run(look.format("/tmp/tree")).stdout


@pytest.mark.parametrize("prefix", ["", SOMEBODY])
def test_changes_are_told_as_they_happen(sandbox: Sandbox, prefix: str) -> None:
    sandbox.run("rm -rf /tmp/watched; mkdir -m 777 /tmp/watched")
    connection = http.client.HTTPConnection(sandbox.address, timeout=30)
    path = f"{sandbox.prefix}{prefix}/files/watch?path=/tmp/watched&recursive=true"
    connection.request("GET", path, headers=sandbox.headers)
    stream = connection.getresponse()
    assert stream.status == 200, stream.read()
    sandbox.run("mkdir -p /tmp/watched/a/b; echo x > /tmp/watched/a/b/f; rm -r /tmp/watched")
    told = []
    for line in stream:
        if line.startswith(b"data: "):
            told.append(json.loads(line[6:]))
    connection.close()
    assert {"type": "create", "path": "/tmp/watched/a", "kind": "directory"} in told
    assert told[-1] == {"type": "delete", "path": "/tmp/watched", "kind": "directory"}
