# SPDX-License-Identifier: Apache-2.0
"""The Go programs serve what their contract promises, and nothing else: patterns of their muxes against spec/."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
METHODS = ("get", "head", "post", "put", "patch", "delete")
# A pattern is a text of this form and can be nothing else; the mux itself does not tell its patterns.
PATTERN = re.compile(r'"((?:GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS|CONNECT) /[^"\s]*)"')
PROGRAMS = {
    "execd": ("execd", "command", "file", "metric", "code", "session", "pty", "isolated"),
    "sandboxd": ("sandboxd",),
}
# Go's mux takes no two patterns that fit one path, so execd tells these apart itself.
SHARED = {
    "GET /command/{first}/{second}": {
        "GET /command/status/{id}",
        "GET /command/{id}/logs",
        "GET /command/{id}/attach",
    }
}


def promised(program: str) -> set[str]:
    paths = yaml.safe_load((ROOT / "spec" / f"{program}.yaml").read_text())["paths"]
    # What is passed on to programs is no pattern: the mux would clean up paths that are theirs.
    own = {path: item for path, item in paths.items() if not item.get("x-proxy")}
    return {f"{method.upper()} {path}" for path, item in own.items() for method in METHODS if method in item}


def served(program: str) -> set[str]:
    found: set[str] = set()
    for package in PROGRAMS[program]:
        for source in (ROOT / "node" / package).glob("*.go"):
            if not source.name.endswith("_test.go"):
                for pattern in PATTERN.findall(source.read_text()):
                    found |= SHARED.get(pattern, {pattern})
    return found


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_promised_route_is_served_and_no_other(program: str) -> None:
    assert served(program) == promised(program)


def test_no_other_package_adds_routes() -> None:
    """Otherwise the test above would look past them."""
    registering = {
        source.parent.name
        for source in (ROOT / "node").rglob("*.go")
        if not source.name.endswith("_test.go") and re.search(r"\.HandleFunc\(|\*http\.ServeMux", source.read_text())
    }
    assert registering == {package for packages in PROGRAMS.values() for package in packages}


def test_files_are_served_under_other_identities_too() -> None:
    """The prefix is put before each pattern of the package by its one loop, which its own tests walk."""
    prefix = yaml.safe_load((ROOT / "spec" / "execd.yaml").read_text())["x-identity-prefix"]
    assert f'identityPrefix = "{prefix}"' in (ROOT / "node" / "file" / "identity.go").read_text()
    of_files = {route for route in promised("execd") if re.match(r"[A-Z]+ /(files|directories)", route)}
    registered = set(PATTERN.findall((ROOT / "node" / "file" / "file.go").read_text()))
    assert registered == of_files


def test_the_way_to_programs_is_where_the_contract_says() -> None:
    paths = yaml.safe_load((ROOT / "spec" / "execd.yaml").read_text())["paths"]
    root = re.search(r'const Root = "(.*)"', (ROOT / "node" / "httpproxy" / "httpproxy.go").read_text())
    assert root is not None
    assert [path for path, item in paths.items() if item.get("x-proxy")] == [f"{root[1]}{{port}}/{{path}}"]
