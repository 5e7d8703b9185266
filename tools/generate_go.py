# SPDX-License-Identifier: Apache-2.0
"""Turn the schemas of an OpenAPI 3.1 file into plain Go structs.

Only what our own spec uses is understood; anything else stops the run with the name of the schema, so that a
spec never generates something half right. Structs have json tags and nothing else: no client, no runtime
library, so the Go module keeps its short list of dependencies.

The rules a reader of the Go side needs:

* required                    -> plain value, always written. A nil slice would be written as null: set it.
* optional string, list, map  -> plain value, left out when empty
* optional time               -> plain value, left out when zero
* optional number or bool     -> a pointer where 0 and absent differ (an exit code, a uid); a plain value where
                                 the spec's minimum is above 0 or its default is Go's zero value
* optional object             -> pointer
* `type: [x, "null"]`         -> pointer; nil is written as null
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

INITIALISMS = {"api", "cpu", "gid", "id", "ids", "os", "pid", "sha256", "uid", "uri", "url"}
SCALARS = {
    ("string", None): "string",
    ("string", "date-time"): "time.Time",
    ("string", "binary"): "[]byte",
    ("integer", None): "int",
    ("integer", "int64"): "int64",
    ("number", None): "float64",
    ("boolean", None): "bool",
}

Schema = dict[str, Any]


def go_name(wire_name: str) -> str:
    """`requestId`, `exit_code`, `tokenSha256` -> RequestID, ExitCode, TokenSHA256."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", wire_name)
    return "".join(
        "IDs" if w.lower() == "ids" else w.upper() if w.lower() in INITIALISMS else w[0].upper() + w[1:] for w in words
    )


def comment(text: str | None, indent: str = "") -> list[str]:
    if not text:
        return []
    words, lines, line = text.split(), [], ""
    for word in words:
        if line and len(indent) + len(line) + len(word) + 4 > 110:
            lines.append(line)
            line = word
        else:
            line = f"{line} {word}".strip()
    return [f"{indent}// {part}" for part in [*lines, line]]


class _File:
    """The declarations of one spec file, in the order of the spec."""

    def __init__(self, schemas: dict[str, Schema]) -> None:
        self.schemas = schemas
        self.names: list[str] = []
        self.out: list[str] = []
        for name, schema in schemas.items():
            self.declare(name, schema)

    def declare(self, name: str, schema: Schema) -> None:
        if "enum" in schema:
            self.enum(name, schema)
        elif "allOf" in schema or (schema.get("type") == "object" and "properties" in schema):
            self.struct(name, schema)
        else:
            raise SystemExit(f"generate_go: schema {name} is neither an object nor an enum")

    def enum(self, name: str, schema: Schema) -> None:
        self.names.append(name)
        self.out += ["", *(comment(schema.get("description")) or [f"// {name} is one of the constants below."])]
        self.out += [f"type {name} string", "", "const ("]
        self.out += [f'\t{name}{go_name(value)} {name} = "{value}"' for value in schema["enum"]]
        self.out += [")"]

    def struct(self, name: str, schema: Schema) -> None:
        self.names.append(name)
        nested: list[tuple[str, Schema]] = []
        lines = ["", *comment(schema.get("description")), f"type {name} struct {{"]
        for part in schema.get("allOf", [schema]):
            if "$ref" in part:
                lines.append(f"\t{self.ref(part)}")
            else:
                required = set(part.get("required", ()))
                for field, field_schema in part.get("properties", {}).items():
                    lines += self.field(name, field, field_schema, field in required, nested)
        self.out += [*lines, "}"]
        for nested_name, nested_schema in nested:
            self.declare(nested_name, nested_schema)

    def field(
        self, owner: str, field: str, schema: Schema, required: bool, nested: list[tuple[str, Schema]]
    ) -> list[str]:
        kind, nullable = self.type_of(f"{owner}{go_name(field)}", schema, nested)
        tag = field
        if nullable:
            kind = f"*{kind}"
        elif not required:
            zero_is_absent = schema.get("minimum", 0) > 0 or schema.get("default", 1) in (0, False)
            if kind == "time.Time":
                tag += ",omitzero"
            else:
                tag += ",omitempty"
                if self.is_struct(schema) or (kind in {"int", "int64", "float64", "bool"} and not zero_is_absent):
                    kind = f"*{kind}"
        lines = comment(schema.get("description"), "\t")
        return [*lines, f'\t{go_name(field)} {kind} `json:"{tag}"`']

    def type_of(self, name: str, schema: Schema, nested: list[tuple[str, Schema]]) -> tuple[str, bool]:
        """The Go type, and whether null is allowed in its place."""
        if "$ref" in schema:
            return self.ref(schema), False
        if "enum" in schema:
            # The description stands at the field already.
            nested.append((name, {"enum": schema["enum"]}))
            return name, False
        kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        nullable = "null" in kinds
        (kind,) = [k for k in kinds if k != "null"]
        if kind == "array":
            return f"[]{self.item(name, schema['items'], nested)}", nullable
        if kind == "object":
            extra = schema.get("additionalProperties", True)
            if "properties" in schema:
                raise SystemExit(f"generate_go: {name}: give an inline object a name of its own")
            return f"map[string]{'any' if extra is True else self.item(name, extra, nested)}", nullable
        try:
            return SCALARS[kind, schema.get("format")], nullable
        except KeyError:
            raise SystemExit(f"generate_go: {name}: no Go type for {kind} {schema.get('format')}") from None

    def item(self, name: str, schema: Schema, nested: list[tuple[str, Schema]]) -> str:
        kind, nullable = self.type_of(name, schema, nested)
        return f"*{kind}" if nullable else kind

    def ref(self, schema: Schema) -> str:
        name = str(schema["$ref"]).rsplit("/", 1)[-1]
        if name not in self.schemas:
            raise SystemExit(f"generate_go: {schema['$ref']} does not exist")
        return name

    def is_struct(self, schema: Schema) -> bool:
        return "$ref" in schema and "enum" not in self.schemas[self.ref(schema)]


def gofmt(source: str) -> str:
    return subprocess.run(["gofmt"], input=source, capture_output=True, text=True, check=True).stdout


def types(spec: Path, header: str) -> tuple[str, list[str]]:
    """Go source for the schemas of `spec`, and the names it declares."""
    document = yaml.safe_load(spec.read_text())
    file = _File(document["components"]["schemas"])
    body = "\n".join(file.out)
    imports = '\nimport "time"\n' if "time.Time" in body else ""
    return gofmt(f"{header}\npackage wire\n{imports}{body}\n"), file.names


def errors(spec: Path, header: str) -> str:
    """Go source for the closed list of error codes."""
    document = yaml.safe_load(spec.read_text())
    kinds, codes = document["kinds"], document["codes"]
    names = {code: "Code" + "".join(word.capitalize() for word in re.split(r"::|_", code)) for code in codes}
    out = [
        header,
        "package wire",
        "",
        "// Code names one kind of failure; the list is closed.",
        "type Code string",
        "",
        "const (",
        *[f'\t{names[code]} Code = "{code}"' for code in codes],
        ")",
        "",
        "// Status is the HTTP status that goes with the code; 500 for one that is not in the list.",
        "func (c Code) Status() int {",
        "\tif i, ok := codes[c]; ok {",
        "\t\treturn i.status",
        "\t}",
        "\treturn 500",
        "}",
        "",
        "// Hint says what to do next, unless the place that fails knows better.",
        "func (c Code) Hint() string { return codes[c].hint }",
        "",
        "var codes = map[Code]struct {",
        "\tstatus int",
        "\thint   string",
        "}{",
    ]
    for code, entry in codes.items():
        status = entry.get("status", kinds[entry["kind"]]["status"])
        hint = entry["hint"].replace("\\", "\\\\").replace('"', '\\"')
        out.append(f'\t{names[code]}: {{{status}, "{hint}"}},')
    out += ["}", ""]
    return gofmt("\n".join(out))


def queries(spec: Path, header: str, function: str) -> str:
    """Go source of a function that knows the query parameters of each operation of `spec`."""
    document = yaml.safe_load(spec.read_text())
    shared = document["components"].get("parameters", {})
    out = [
        header,
        "package wire",
        "",
        f"// {function} gives the query parameters of an operation, named like `GET /path/{{id}}`; known is false when",
        "// the contract does not have it.",
        f"func {function}(operation string) (names []string, known bool) {{",
        "\tswitch operation {",
    ]
    for path, item in document["paths"].items():
        for method in ("get", "head", "post", "put", "patch", "delete"):
            if method not in item:
                continue
            given = [*item.get("parameters", []), *item[method].get("parameters", [])]
            given = [shared[p["$ref"].rpartition("/")[2]] if "$ref" in p else p for p in given]
            names = [f'"{p["name"]}"' for p in given if p["in"] == "query"]
            value = f"[]string{{{', '.join(names)}}}" if names else "nil"
            out += [f'\tcase "{method.upper()} {path}":', f"\t\treturn {value}, true"]
    return gofmt("\n".join([*out, "\t}", "\treturn nil, false", "}", ""]))
