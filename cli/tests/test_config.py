# SPDX-License-Identifier: Apache-2.0
"""Settings: which source wins, what is refused, who may read the file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conftest import Osb
from opensandbox_cli import config
from opensandbox_cli.failure import Failure


def settings_file(environment: dict[str, str]) -> Path:
    return Path(environment["HOME"]) / ".opensandbox" / "config.toml"


def shown(osb: Osb, *flags: str, **variables: str) -> dict[str, object]:
    found = json.loads(osb(*flags, "config", "show", "-o", "json", **variables).stdout)
    assert isinstance(found, dict)
    return found


def test_flags_win_over_environment_over_file_over_defaults(here: Osb) -> None:
    assert shown(here)["domain"] == "localhost:8080"
    here("config", "set", "connection.domain", "file:1")
    assert shown(here)["domain"] == "file:1"
    assert shown(here, OPEN_SANDBOX_DOMAIN="env:1")["domain"] == "env:1"
    assert shown(here, "--domain", "flag:1", OPEN_SANDBOX_DOMAIN="env:1")["domain"] == "flag:1"


@pytest.mark.parametrize(
    ("variable", "name", "text", "value"),
    [
        ("OPEN_SANDBOX_PROTOCOL", "protocol", "https", "https"),
        ("OPEN_SANDBOX_REQUEST_TIMEOUT", "request_timeout", "1m", 60),
        ("OPEN_SANDBOX_USE_SERVER_PROXY", "use_server_proxy", "true", True),
    ],
)
def test_the_environment_is_read(here: Osb, variable: str, name: str, text: str, value: object) -> None:
    assert shown(here, **{variable: text})[name] == value


def test_the_published_keys_are_shown(here: Osb, environment: dict[str, str]) -> None:
    assert shown(here) == {
        "api_key": None,
        "domain": "localhost:8080",
        "protocol": "http",
        "request_timeout": 30,
        "use_server_proxy": False,
        "color": True,
        "default_image": None,
        "default_timeout": None,
        "config_path": str(settings_file(environment)),
        "config_file_exists": False,
    }


def test_the_key_is_never_shown(here: Osb) -> None:
    secret = "sk-very-secret-key-1"
    said = here("config", "set", "connection.api_key", secret).stdout
    for form in ("table", "json", "yaml"):
        said += here("config", "show", "-o", form).stdout
    assert secret.encode() not in said
    assert b"sk********-1" in said
    assert config.masked("short") == "********"


def test_the_file_is_nobody_elses(here: Osb, environment: dict[str, str]) -> None:
    file = settings_file(environment)
    here("config", "init")
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o644)
    here("config", "set", "connection.api_key", "k" * 20)
    assert file.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["config.toml"]


def test_init_keeps_a_file_that_exists(here: Osb, environment: dict[str, str]) -> None:
    here("config", "set", "defaults.image", "host")
    assert b"--force" in here("config", "init", code=1).stderr
    assert shown(here)["default_image"] == "host"
    here("config", "init", "--force")
    assert shown(here)["default_image"] is None
    assert here("config", "path").stdout.decode().strip() == str(settings_file(environment))


def test_set_leaves_comments_alone(here: Osb, environment: dict[str, str]) -> None:
    file = settings_file(environment)
    file.parent.mkdir()
    file.write_text('# mine\n[defaults]\nimage = "a"  # why\n')
    here("config", "set", "defaults.image", "b")
    assert file.read_text() == '# mine\n[defaults]\nimage = "b"  # why\n'


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("connection.domian", "x", "did you mean connection.domain?"),
        ("foo.bar", "1", "There are: connection.api_key"),
        ("connection.protocol", "ftp", "is http or https"),
        ("connection.request_timeout", "abc", "not a duration"),
        ("connection.request_timeout", "0", "more than zero"),
        ("connection.use_server_proxy", "maybe", "true or false"),
        ("defaults.timeout", "soon", "not a duration"),
    ],
)
def test_set_refuses_what_makes_no_sense(
    here: Osb, environment: dict[str, str], key: str, value: str, said: str
) -> None:
    assert said in here("config", "set", key, value, code=2).stderr.decode()
    assert not settings_file(environment).exists()


def test_unknown_keys_of_a_file_are_named(here: Osb, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('colour = 1\n[connection]\ndomian = "x"\n')
    said = here("--config", str(file), "config", "show").stderr.decode()
    assert f"{file}: connection.domian is not known and ignored; did you mean connection.domain?" in said
    assert f"{file}: colour stands outside of a section" in said


def test_a_broken_file_is_an_error_of_one_line(here: Osb, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[connection\n")
    for arguments in (["sandbox", "list"], ["config", "show"]):
        said = here("--config", str(file), *arguments, code=2).stderr.decode()
        assert said.startswith(f"error: {file} is not TOML")
        assert len(said.splitlines()) == 1
    assert b"Usage" in here("--config", str(file), "sandbox", "list", "--help").stdout


def test_a_wrong_value_names_its_source_and_not_the_value() -> None:
    with pytest.raises(Failure) as caught:
        config.resolve({}, {"OPEN_SANDBOX_PROTOCOL": "ftp"}, None)
    assert "OPEN_SANDBOX_PROTOCOL: connection.protocol" in str(caught.value)
    assert "ftp" not in str(caught.value)


def test_what_applies_unset_is_shown(here: Osb) -> None:
    lines = [line.split() for line in here("config", "show").stdout.decode().splitlines()]
    assert ["defaults.timeout", "10m", "default"] in lines
    here("config", "set", "defaults.timeout", "none")
    lines = [line.split() for line in here("config", "show").stdout.decode().splitlines()]
    assert ["defaults.timeout", "none"] in [line[:2] for line in lines]
