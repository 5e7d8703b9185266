# SPDX-License-Identifier: Apache-2.0
"""What a create may ask for: honoured, refused by name, or accepted with a warning."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from world import BODY, PLATFORM, START

from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.validation import Rules, Wish, validate
from opensandbox_server.wire.lifecycle import CreateSandboxRequest

RULES = Rules(runtime="local", platform=PLATFORM, max_timeout=86400)


def wish(rules: Rules = RULES, **changes: Any) -> Wish:
    return validate(CreateSandboxRequest.model_validate({**BODY, **changes}), rules, START)


def refusal(**changes: Any) -> OpenSandboxError:
    with pytest.raises(OpenSandboxError) as caught:
        wish(**changes)
    return caught.value


def test_the_body_published_clients_send() -> None:
    made = wish()
    assert made.image == "host"
    assert made.entrypoint == ("tail", "-f", "/dev/null")
    assert made.limits.cpu_millis == 1000
    assert made.expires_at == START + timedelta(seconds=600)
    assert made.warnings == ()


@pytest.mark.parametrize("timeout", [None, 60, 86400])
def test_timeouts(timeout: int | None) -> None:
    assert wish(timeout=timeout).expires_at == (START + timedelta(seconds=timeout) if timeout else None)


@pytest.mark.parametrize(("timeout", "rules"), [(86401, RULES), (10**12, Rules("local", PLATFORM)), (10**30, RULES)])
def test_timeouts_that_are_too_long(timeout: int, rules: Rules) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        wish(rules, timeout=timeout)
    assert caught.value.code is Code.SANDBOX_INVALID_PARAMETER


@pytest.mark.parametrize(
    "changes",
    [
        {"image": None},
        {"image": {"uri": "  "}},
        {"image": None, "snapshotId": " "},
        {"snapshotId": "s-1"},
        {"snapshotId": "s-1", "templateId": "t-1"},
        {"entrypoint": None},
        {"credentialProxy": {"enabled": True}},
        {"env": {"OPENSANDBOX_LIFECYCLE": "{}"}},
    ],
)
def test_rules_across_fields_are_violations_of_the_shape(changes: dict[str, Any]) -> None:
    error = refusal(**changes)
    assert error.status == 422
    assert error.violations[0]["loc"][0] == "body"
    assert error.violations[0]["msg"].startswith("Value error, ")


def test_a_snapshot_is_not_found() -> None:
    told = refusal(image=None, entrypoint=None, snapshotId="s-1")
    assert told.code is Code.SNAPSHOT_NOT_FOUND
    assert "from an image" in told.hint


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": None, "templateId": "t-1"}, "templateId"),
        ({"image": None, "extensions": {"poolRef": "p"}}, "extensions.poolRef"),
        ({"extensions": {"poolRef": "p"}}, "extensions.poolRef"),
        ({"extensions": {"access.renew.extend.seconds": "300"}}, "extensions.access.renew.extend.seconds"),
        ({"networkPolicy": {}}, "networkPolicy"),
        ({"networkPolicy": {"defaultAction": "deny"}, "credentialProxy": {"enabled": True}}, "networkPolicy"),
        ({"secureAccess": True}, "secureAccess"),
        ({"volumes": [{"name": "v"}]}, "volumes"),
        ({"lifecycle": {"preStart": {"command": ["x"]}}}, "lifecycle"),
        ({"resourceRequests": {"cpu": "1"}}, "resourceRequests"),
        ({"resourceLimits": {"gpu": "all"}}, "resourceLimits.gpu"),
        ({"platform": {"os": "windows", "arch": "amd64"}}, "platform windows/amd64"),
        ({"platform": {"os": "linux", "arch": "arm64"}}, "platform linux/arm64"),
    ],
)
def test_what_the_runtime_cannot_honour_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    error = refusal(**changes)
    assert error.code is Code.SANDBOX_API_NOT_SUPPORTED
    assert error.status == 400
    assert error.details == {"runtime": "local", "field": field}
    assert "local" in error.message


@pytest.mark.parametrize(
    "changes",
    [
        {"volumes": []},
        {"volumes": None},
        {"lifecycle": {}},
        {"resourceRequests": {}},
        {"credentialProxy": {"enabled": False}},
        {"networkPolicy": None},
        {"env": None},
        {"metadata": None},
        {"extensions": None},
        {"resourceLimits": None},
        {"templateId": ""},
    ],
)
def test_empty_is_as_good_as_absent(changes: dict[str, Any]) -> None:
    assert wish(**changes).warnings == ()


def test_this_machines_platform_is_kept() -> None:
    assert wish(platform=PLATFORM).platform == PLATFORM


def test_isolated_runs_are_enabled_by_a_word() -> None:
    asked = wish(extensions={"bootstrap.execd.isolation": "enable"})
    assert asked.extensions == {"bootstrap.execd.isolation": "enable"}
    assert asked.warnings == ()
    for value in ("disable", "true", ""):
        told = refusal(extensions={"bootstrap.execd.isolation": value})
        assert told.code is Code.SANDBOX_INVALID_PARAMETER
        assert "enable" in told.message


@pytest.mark.parametrize("value", ["299", "86401", "abc", "", "300.0", "-300", "³00", "9" * 5000])
def test_renewal_on_access_is_checked_before_it_is_refused(value: str) -> None:
    assert refusal(extensions={"access.renew.extend.seconds": value}).code is Code.SANDBOX_INVALID_PARAMETER


def test_our_extensions_are_kept_and_unknown_ones_are_named() -> None:
    made = wish(extensions={"opensandbox.extensions.team": "blue", "storage.id": "7"})
    assert made.extensions == {"opensandbox.extensions.team": "blue"}
    assert made.warnings == ("The unknown extension 'storage.id' was ignored.",)


def test_unknown_top_level_fields_are_named() -> None:
    assert wish(colour="red", shape=None).warnings == (
        "The unknown field 'colour' was ignored.",
        "The unknown field 'shape' was ignored.",
    )


def test_credentials_for_an_image_are_not_used_and_not_kept() -> None:
    made = wish(image={"uri": "host", "auth": {"username": "u", "password": "hunter2"}})
    assert len(made.warnings) == 1
    assert "hunter2" not in repr(made)


def test_env_values_of_null_are_skipped() -> None:
    assert wish(env={"A": "1", "B": None, "C": ""}).env == {"A": "1", "C": ""}


def test_egress_settings_are_dropped_with_a_warning_or_refused() -> None:
    made = wish(env={"OPENSANDBOX_EGRESS_LOG_LEVEL": "debug", "A": "1"})
    assert made.env == {"A": "1"}
    assert "OPENSANDBOX_EGRESS_LOG_LEVEL" in made.warnings[0]
    assert refusal(env={"OPENSANDBOX_EGRESS_TOKEN": "x"}).code is Code.SANDBOX_INVALID_PARAMETER


@pytest.mark.parametrize(
    "env",
    [
        {"": "x"},
        {"A=B": "x"},
        {"A\0": "x"},
        {"A": "x\0y"},
        {"A": "x" * 131072},
        {f"K{number}": "x" * 100_000 for number in range(11)},
    ],
)
def test_env_that_no_process_could_have(env: dict[str, str]) -> None:
    assert refusal(env=env).code is Code.SANDBOX_INVALID_PARAMETER


@pytest.mark.parametrize("entrypoint", [[""], ["  "], ["a\0b"], ["a", "b\0"], ["x" * 131072]])
def test_entrypoints_that_cannot_be_run(entrypoint: list[str]) -> None:
    assert refusal(entrypoint=entrypoint).code is Code.SANDBOX_INVALID_ENTRYPOINT


@pytest.mark.parametrize("uri", ["a\nb", "x" * 1025, "a\0"])
def test_image_names_that_are_none(uri: str) -> None:
    assert refusal(image={"uri": uri}).code is Code.SANDBOX_INVALID_PARAMETER


def test_metadata_is_checked() -> None:
    assert refusal(metadata={"a b": "c"}).code is Code.SANDBOX_INVALID_METADATA_LABEL
    assert wish(metadata={"a": "b"}).metadata == {"a": "b"}
