# SPDX-License-Identifier: Apache-2.0
"""Turn the schemas of an OpenAPI 3.1 file into pydantic models, and errors.yaml into an enum.

datamodel-code-generator does the models; this file holds our choice of its many options.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

# The one time that may come without an offset (then it is UTC); all others must have one.
TYPE_OVERRIDES = {"RenewRequest.expires_at": "datetime.datetime"}


def formatted(source: str, rules: str = "I,UP") -> str:
    """The source as ruff writes it, with the fixes of those rules."""
    config = [
        "--config",
        'lint.isort.known-first-party=["code_interpreter", "opensandbox"]',
        "--config",
        'lint.extend-safe-fixes=["UP028"]',
    ]
    for arguments in (
        ["check", "--fix-only", "--quiet", f"--select={rules}", "--line-length=120", *config],
        ["format", "--line-length=120"],
    ):
        command = [sys.executable, "-m", "ruff", *arguments, "--target-version=py311", "--isolated", "-"]
        done = subprocess.run(command, input=source, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"generate_python: ruff: {done.stderr}")
        source = done.stdout
    return source


def types(spec: Path, header: str, *, deferred: bool = False) -> str:
    """pydantic models for the schemas of `spec`; deferred ones are built at first use, for a quick import."""
    overrides = {k: v for k, v in TYPE_OVERRIDES.items() if f" {k.split('.')[0]}:" in spec.read_text()}
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "models.py"
        command = [
            sys.executable, "-m", "datamodel_code_generator",
            "--input", str(spec), "--input-file-type", "openapi", "--output", str(target),
            "--output-model-type", "pydantic_v2.BaseModel", "--target-python-version", "3.11",
            "--ignore-pyproject", "--no-formatters", "--disable-timestamp",
            "--use-annotated", "--field-constraints", "--snake-case-field", "--allow-population-by-field-name",
            "--use-standard-collections", "--use-union-operator", "--collapse-root-models", "--strict-nullable",
            "--enum-field-as-literal", "none", "--naming-strategy", "parent-prefixed", "--capitalise-enum-members",
            "--use-schema-description", "--use-field-description", "--use-single-line-docstring",
            "--set-default-enum-member",
            *(["--type-overrides", json.dumps(overrides)] if overrides else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"generate_python: {spec.name}: {done.stderr}")
        source = target.read_text()
    # Its own header names the input file only; ours names the command that writes the file.
    body = source[source.index("from __future__") :]
    if deferred:
        body = body.replace("populate_by_name=True,", "populate_by_name=True,\n        defer_build=True,")
    return formatted(header + body)


def errors(spec: Path, header: str) -> str:
    """The closed list of error codes with kind, status and hint."""
    document = yaml.safe_load(spec.read_text())
    kinds, codes = document["kinds"], document["codes"]
    member = {code: code.replace("::", "_") for code in codes}
    out = [
        header,
        '"""Every error code of the platform: the closed list."""',
        "from __future__ import annotations",
        "from enum import StrEnum",
        "class Code(StrEnum):",
        '    """Names one kind of failure."""',
        *[f"    {member[code]} = {json.dumps(code)}" for code in codes],
        "KIND: dict[Code, str] = {",
        *[f"    Code.{member[code]}: {json.dumps(entry['kind'])}," for code, entry in codes.items()],
        "}",
        "STATUS: dict[Code, int] = {",
        *[
            f"    Code.{member[code]}: {entry.get('status', kinds[entry['kind']]['status'])},"
            for code, entry in codes.items()
        ],
        "}",
        "HINT: dict[Code, str] = {",
        *[f"    Code.{member[code]}: {json.dumps(entry['hint'])}," for code, entry in codes.items()],
        "}",
        "",
    ]
    return formatted("\n".join(out))
