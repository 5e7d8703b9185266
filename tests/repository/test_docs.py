# SPDX-License-Identifier: Apache-2.0
"""The documentation says what is there: every setting, error code, target and dependency, and no broken link."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from opensandbox_server.config import Config

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    path
    for folder in ("", "docs/**/", "server/**/", "sdks/**/", "cli/**/", "tests/**/", "examples/**/", "bench/**/")
    for path in ROOT.glob(f"{folder}*.md")
    if not {".venv", ".venv-compat", "node_modules"}.intersection(path.parts)
)


def _settings(model: type[BaseModel], name: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for key, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found += _settings(field.annotation, f"{name}.{key}" if name else key)
        else:
            found.append((name, key))
    return found


@pytest.mark.parametrize(("section", "key"), _settings(Config))
def test_every_setting_is_documented(section: str, key: str) -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    in_table = f"### `[{section}]`" in page and f"| `{key}` |" in page.split(f"### `[{section}]`")[1].split("\n#")[0]
    assert in_table or f"| `[{section}] {key}` |" in page or f"| `[{key}]` |" in page


def test_every_setting_says_what_its_value_is() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert [line for line in page.splitlines() if re.search(r"\|\s*\|", line)] == []
    assert '| `format` | `"json"` or `"text"` | none |' in page


def test_every_operation_has_a_summary() -> None:
    paths = yaml.safe_load((ROOT / "spec" / "lifecycle.yaml").read_text())["paths"]
    calls = [call for item in paths.values() for call in item.values() if isinstance(call, dict)]
    assert [call["operationId"] for call in calls if not call.get("summary")] == []


def test_every_error_code_is_documented() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    codes = yaml.safe_load((ROOT / "spec" / "errors.yaml").read_text())["codes"]
    assert [code for code in codes if f"| `{code}` |" not in page] == []


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        ("BACKEND_CONNECTION_FAILED", "Start the program"),
        ("INGRESS::PORT_CLOSED", "Start the program"),
        ("INGRESS::NO_EGRESS", "/v1/runtime"),
        ("INGRESS::ACCESS_REQUIRED", "use_server_proxy"),
        ("SANDBOX::INVALID_EXPIRATION", "ten years"),
    ],
)
def test_a_hint_says_what_to_do_rather_than_the_message_again(code: str, advice: str) -> None:
    assert advice in yaml.safe_load((ROOT / "spec" / "errors.yaml").read_text())["codes"][code]["hint"]


def test_every_target_has_a_line_in_help() -> None:
    text = (ROOT / "Makefile").read_text()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.findall(r"^([a-z-]+):.*##", text, re.MULTILINE)
    wanted = {"setup", "demo", "test", "test-all", "serve", "check", "generate", "build", "bench", "help"}
    assert wanted <= set(targets)
    assert [target for target in targets if f"make {target}" not in shown] == []


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~\[; ]", requirement.strip())[0].lower()


def test_every_dependency_has_a_reason() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text()
    names: set[str] = set()
    for project in ("server", "sdks/python", "sdks/python-code-interpreter", "cli"):
        table = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
        groups = [table.get("dependencies", []), *table.get("optional-dependencies", {}).values()]
        names |= {_name(requirement) for group in groups for requirement in group}
    lines = (ROOT / "requirements-dev.in").read_text().splitlines()
    names |= {_name(line) for line in lines if line and not line.startswith(("#", "-"))}
    module = (ROOT / "node" / "go.mod").read_text()
    names |= {line.split()[-2] for line in re.findall(r"^(?:require )?\s*\S+ v\S+", module, re.MULTILINE)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_in_pages_is_python(page: Path) -> None:
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_folders_named_in_the_map_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = re.findall(r"`((?:server|node|sdks|cli|tests|tools|spec|examples|bench|docs)/[\w./-]*)`", text)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
