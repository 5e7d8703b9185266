# SPDX-License-Identifier: Apache-2.0
"""Imports point inward: the domain knows nobody, adapters know the domain, and only the wiring knows all."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = "opensandbox_server"
SOURCE = Path(__file__).resolve().parents[1] / "src" / PACKAGE

# Each layer may import itself and the layers before it.
LAYERS = {
    "wire": ["wire"],
    "domain": ["sandbox", "errors", "ports", "limits", "labels", "validation", "context"],
    "use cases": [
        "access",
        "admission",
        "background",
        "diagnostics",
        "events",
        "executions",
        "expiry",
        "history",
        "idempotency",
        "lifecycle",
        "logs",
        "metrics",
        "proxy",
        "reconcile",
        "tenants",
    ],
    "adapters": ["store", "runtimes", "api"],
    "wiring": ["app", "config", "init_config", "serve", "statedir", "down", "__main__"],
}
ORDER = list(LAYERS)
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}
# Adapters know the domain and the use cases, never each other.
APART = {"store", "runtimes", "api"}
FOREIGN = {
    "wire": {"pydantic"},
    "domain": {"pydantic"},
    "use cases": {"anyio"},
}
FILES = sorted(path for path in SOURCE.rglob("*.py") if "_bin" not in path.parts)


def imports(path: Path) -> set[str]:
    """Absolute names of everything a file imports, also inside functions."""
    inside = (PACKAGE, *path.relative_to(SOURCE).parent.parts)
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == PACKAGE else {module}
    return names


def part(name: str) -> str:
    """`opensandbox_server.store.sql` is of the part `store`."""
    return name.split(".")[1] if "." in name else ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_inward(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    own = relative.parts[0].removesuffix(".py")
    if own == "__init__":
        assert not imports(path), "importing the package must do nothing"
        return
    assert own in LAYER_OF, f"{relative} is in no layer; add it to LAYERS"
    layer = LAYER_OF[own]
    for name in imports(path):
        if name == PACKAGE or name.startswith(f"{PACKAGE}."):
            other = part(name)
            if other in ("", "__version__"):
                continue
            assert ORDER.index(LAYER_OF[other]) <= ORDER.index(layer), (
                f"{relative} imports {name}, which is further out"
            )
            assert not (own in APART and other in APART - {own}), (
                f"{relative} imports {name}: adapters do not know each other"
            )
        elif layer in FOREIGN:
            root = name.partition(".")[0]
            assert root in sys.stdlib_module_names | FOREIGN[layer], f"{relative} imports {name}"


@pytest.mark.parametrize(("runtime", "others"), [("fake", "local"), ("local", "fake")])
def test_runtimes_do_not_know_each_other(runtime: str, others: str) -> None:
    for path in (SOURCE / "runtimes" / runtime).rglob("*.py"):
        assert not [name for name in imports(path) if f"runtimes.{others}" in name]


def test_no_file_is_named_for_the_lack_of_an_idea() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "manager", "common", "misc")]


def test_importing_the_app_starts_nothing() -> None:
    program = (
        "import sys, threading; import opensandbox_server.app; "
        "assert threading.active_count() == 1; assert 'opensandbox_server.config' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
