# SPDX-License-Identifier: Apache-2.0
"""The configuration file: what is read, what is refused, what is only noted."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from opensandbox_server import config
from opensandbox_server.config import load
from opensandbox_server.errors import CannotStart


def written(tmp_path: Path, text: str, name: str = "sandbox.toml") -> Path:
    file = tmp_path / name
    file.write_text(text)
    return file


def refused(file: Path | None, **options: object) -> CannotStart:
    with pytest.raises(CannotStart) as caught:
        load(file, **{"environ": {}, **options})  # type: ignore[arg-type]
    return caught.value


def test_no_file_means_the_local_runtime_on_loopback(tmp_path: Path) -> None:
    loaded = load(None, environ={}, home=tmp_path)
    assert loaded.file is None
    assert loaded.config.runtime.type == "local"
    assert loaded.config.server.hosts == ("127.0.0.1", "::1")
    assert loaded.config.server.port == 8080
    assert loaded.notes == ()


def test_the_command_line_wins_over_the_environment_over_the_home_directory(tmp_path: Path) -> None:
    home = written(tmp_path, "[server]\nport = 1\n", ".sandbox.toml")
    environment = written(tmp_path, "[server]\nport = 2\n", "environment.toml")
    named = written(tmp_path, "[server]\nport = 3\n", "named.toml")
    environ = {"SANDBOX_CONFIG_PATH": str(environment)}
    assert load(None, environ={}, home=tmp_path).file == home
    assert load(None, environ=environ, home=tmp_path).config.server.port == 2
    assert load(named, environ=environ, home=tmp_path).config.server.port == 3


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    assert "--config names" in refused(tmp_path / "absent.toml").message
    assert "SANDBOX_CONFIG_PATH names" in refused(None, environ={"SANDBOX_CONFIG_PATH": "/absent"}).message


def test_the_environment_gives_key_and_state_directory_and_flags_win(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\napi_key = "from-file"\nstate_dir = "/from-file"\n')
    environ = {"OPENSANDBOX_SERVER_API_KEY": "from-env", "OPENSANDBOX_STATE_DIR": "/from-env"}
    server = load(file, environ=environ).config.server
    assert server.api_key is not None
    assert server.api_key.get_secret_value() == "from-env"
    assert server.state_dir == Path("/from-env")
    assert load(file, environ=environ, overrides={"state_dir": "/flag"}).config.server.state_dir == Path("/flag")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[server]\nprot = 1\n", "[server] prot is not known; did you mean port?"),
        ("[sever]\nport = 1\n", "[sever] is not known; did you mean [server]?"),
        ('[server]\nfree_space_reserve = "1g"\n', "[server] free_space_reserve is not known; it belongs in [local]"),
        ("[egress.upstream_proxy]\nuri = 'x'\n", "[egress.upstream_proxy] uri is not known; did you mean url?"),
        ("[server]\nzzz = 1\n", "[server] zzz is not known."),
        ('[server]\nport = "x"\n', "[server] port: input should be a valid integer"),
        ('[local]\nfree_space_reserve = "lots"\n', "[local] free_space_reserve: write a size such as"),
        ("[server\n", "is not valid TOML"),
        ('server = "x"\n', "[server]: input should be a valid dictionary"),
    ],
)
def test_a_wrong_key_or_value_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = written(tmp_path, text)
    error = refused(file)
    assert expected in error.message
    assert "?." not in error.message
    assert str(file) in error.message


def test_every_error_is_told_at_once_and_no_secret_is_shown(tmp_path: Path) -> None:
    error = refused(written(tmp_path, "[server]\nprot = 1\nhots = 2\napi_key = 5309\n"))
    assert len(error.message.splitlines()) == 3
    assert "5309" not in error.message


@pytest.mark.parametrize(
    ("written_as", "expected"), [('"512MiB"', 512 << 20), ('"2g"', 2 << 30), ("4096", 4096), ('"1.5k"', 1536)]
)
def test_sizes(tmp_path: Path, written_as: str, expected: int) -> None:
    file = written(tmp_path, f"[local]\nfree_space_reserve = {written_as}\n")
    assert load(file, environ={}).config.local.free_space_reserve == expected


def test_published_keys_that_mean_nothing_here_are_noted(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        '[runtime]\ntype = "local"\nexecd_image = "opensandbox/execd:v1"\n[docker]\nnetwork_mode = "bridge"\n'
        '[kubernetes]\nnamespace = "x"\nanything = 1\n[server]\nport = 9\n',
    )
    notes = load(file, environ={}).notes
    assert [note.split(" has")[0] for note in notes] == [
        "[runtime] execd_image",
        "[docker] network_mode",
        "[kubernetes]",
    ]


@pytest.mark.parametrize("kind", ["docker", "kubernetes"])
def test_runtimes_that_are_not_built_are_refused_and_local_is_named(tmp_path: Path, kind: str) -> None:
    error = refused(written(tmp_path, f'[runtime]\ntype = "{kind}"\nexecd_image = "x"\n'))
    assert "not built yet" in error.message
    assert '"local"' in error.hint


@pytest.mark.parametrize(
    "text",
    [
        '[secure_runtime]\ntype = "gvisor"\n',
        '[tenants]\nprovider = "http"\n',
        '[store]\ntype = "postgresql"\n',
        "[renew_intent]\nenabled = true\n",
        '[ingress]\nmode = "gateway"\n',
        '[ingress.secure_access]\nactive_key = "a"\n',
        "[otel]\nenabled = true\n",
    ],
)
def test_promises_that_cannot_be_kept_are_refused(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    assert refused(file).message.startswith(f"{file}: [")
    assert "cannot be honoured" in refused(file).message


def test_every_origin_needs_a_key(tmp_path: Path) -> None:
    file = written(tmp_path, '[server]\ncors_origins = ["http://localhost:3000", "*"]\n')
    error = refused(file)
    assert "cors_origins" in error.message
    assert "api_key" in error.hint
    refused(file, environ={"OPENSANDBOX_INSECURE_SERVER": "YES"})
    load(file, environ={"OPENSANDBOX_SERVER_API_KEY": "k"})
    load(written(tmp_path, '[server]\ncors_origins = ["*"]\n[tenants]\nprovider = "file"\n'), environ={})
    load(written(tmp_path, '[server]\ncors_origins = ["http://localhost:3000"]\n'), environ={})


@pytest.mark.parametrize(
    "text", ['[secure_runtime]\ntype = ""\n', '[store]\ntype = "sqlite"\n', "[renew_intent]\nenabled = false\n"]
)
def test_their_defaults_may_be_written_down(tmp_path: Path, text: str) -> None:
    load(written(tmp_path, text), environ={})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "sandbox.example"])
def test_an_open_address_needs_a_key(tmp_path: Path, host: str) -> None:
    file = written(tmp_path, f'[server]\nhost = "{host}"\n')
    error = refused(file)
    assert "without an API key" in error.message
    assert "OPENSANDBOX_SERVER_API_KEY" in error.hint
    load(file, environ={"OPENSANDBOX_SERVER_API_KEY": "k"})
    load(file, environ={"OPENSANDBOX_INSECURE_SERVER": "YES"})
    refused(file, environ={"OPENSANDBOX_INSECURE_SERVER": "yes"})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.5", "::1"])
def test_loopback_needs_none(tmp_path: Path, host: str) -> None:
    load(written(tmp_path, f'[server]\nhost = "{host}"\n'), environ={})


def test_an_empty_key_is_refused(tmp_path: Path) -> None:
    assert "empty" in refused(written(tmp_path, '[server]\napi_key = ""\n')).message


def test_models_are_frozen(tmp_path: Path) -> None:
    loaded = load(None, environ={}, home=tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        loaded.config.server.port = 1  # type: ignore[misc]


def test_a_sentence_stands_under_each_field() -> None:
    tree = ast.parse(inspect.getsource(config))
    models = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        and any(isinstance(base, ast.Name) and base.id == "_Part" for base in node.bases)
    ]
    assert len(models) > 10
    for model in models:
        body = model.body
        for field, below in zip(body, [*body[1:], None], strict=True):
            if isinstance(field, ast.AnnAssign):
                text = (
                    below.value.value if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) else ""
                )
                assert str(text).endswith("."), f"{model.name}: {ast.unparse(field.target)}"


def test_tenants_and_one_key_exclude_each_other(tmp_path: Path) -> None:
    text = '[tenants]\nprovider = "file"\n'
    assert load(written(tmp_path, text), environ={}).config.tenants.provider == "file"
    assert "exclude each other" in refused(written(tmp_path, f'[server]\napi_key = "k"\n{text}')).message
    assert "exclude" in refused(written(tmp_path, text), environ={"OPENSANDBOX_SERVER_API_KEY": "k"}).message
    load(written(tmp_path, f'[server]\nhost = "0.0.0.0"\n{text}'), environ={})  # their keys guard it
    assert "no provider" in refused(written(tmp_path, "[tenants]\n")).message


def test_where_the_list_of_tenants_is(tmp_path: Path) -> None:
    assert config.tenants_file({}, tmp_path) == tmp_path / ".opensandbox" / "tenants.toml"
    assert config.tenants_file({"SANDBOX_TENANTS_CONFIG_PATH": "/etc/t.toml"}, tmp_path) == Path("/etc/t.toml")
