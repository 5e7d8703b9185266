# SPDX-License-Identifier: Apache-2.0
"""`init-config`: files that load, or say in one line what is missing; never an overwritten one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from opensandbox_server.__main__ import main
from opensandbox_server.config import Config, Server, load
from opensandbox_server.errors import CannotStart
from opensandbox_server.init_config import EXAMPLES, example


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("SANDBOX_CONFIG_PATH", "OPENSANDBOX_SERVER_API_KEY", "OPENSANDBOX_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_it_writes_to_the_home_directory_and_the_result_loads(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init-config", "--example", "local"]) == 0
    file = home / ".sandbox.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    assert f"Wrote {file}." in capsys.readouterr().out
    loaded = load(None, environ={}, home=home)
    assert (loaded.file, loaded.notes) == (file, ())
    assert loaded.config.server.max_sandbox_timeout_seconds == 86400


def test_an_existing_file_stays_unless_forced(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = home / "mine.toml"
    file.write_text("# mine, and longer than any example\n" * 1000)
    file.chmod(0o644)
    assert main(["init-config", str(file)]) == 1
    assert "--force" in capsys.readouterr().err
    assert file.read_text().startswith("# mine")
    assert main(["init-config", str(file), "--force"]) == 0
    assert file.read_text() == example(None)
    assert file.stat().st_mode & 0o777 == 0o600
    assert main(["init-config", str(home / "missing" / "x.toml")]) == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_each_example_holds_known_keys_only(name: str) -> None:
    assert example(name).startswith("# SPDX-License-Identifier: Apache-2.0\n")
    Config.model_validate(tomllib.loads(example(name)))


@pytest.mark.parametrize(
    ("name", "runtime"),
    [("docker", "docker"), ("docker-zh", "docker"), ("k8s", "kubernetes"), ("k8s-zh", "kubernetes")],
)
def test_a_runtime_that_is_not_there_yet_is_named(
    name: str, runtime: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init-config", "--example", name]) == 0
    assert f'"{runtime}" is not built yet' in capsys.readouterr().out
    with pytest.raises(CannotStart, match=f'"{runtime}" is not built yet') as caught:
        load(None, environ={}, home=home)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", ["docker", "docker-zh", "k8s", "k8s-zh"])
def test_an_empty_list_of_host_paths_is_said_to_allow_none(name: str) -> None:
    comment = example(name).split("\nallowed_host_paths = []")[0].splitlines()[-1]
    assert ("Empty: none" in comment) or ("\u5168\u90e8\u4e0d\u5141\u8bb8" in comment)


def test_the_skeleton_has_every_key_and_sets_none() -> None:
    assert tomllib.loads(example(None)) == {}
    bare = re.sub(r"^# (?=\[|\w+ =)", "", example(None), flags=re.MULTILINE)
    filled = tomllib.loads(re.sub(r"^(\w+) =$", "", bare, flags=re.MULTILINE))
    assert {key: filled["server"][key] for key in ("host", "port", "max_waiting")} == {
        "host": "localhost",
        "port": 8080,
        "max_waiting": 1000,
    }
    set_at_all = {key: value for key, value in filled.items() if value}
    assert Config.model_validate(set_at_all) == Config(), "what is written there is the default"
    published_only = {"thread_pool_size", "loop", "http"}
    assert all(f"# {key} =" in example(None) for key in set(Server.model_fields) - published_only)
