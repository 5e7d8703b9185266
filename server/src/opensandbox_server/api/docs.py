# SPDX-License-Identifier: Apache-2.0
"""The contract, served as it is written, and a page to read it: no scripts, nothing fetched from elsewhere."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Response

from .answers import answer

_STYLE = "body{font:15px/1.5 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}td{padding:.2em 1em .2em 0}"
_NOTHING_ELSE = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'"}


@cache
def specification() -> dict[str, Any]:
    """spec/lifecycle.yaml."""
    text = (files("opensandbox_server") / "wire" / "lifecycle.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def docs_routes() -> APIRouter:
    routes = APIRouter()

    @routes.get("/openapi.json")
    async def get_specification() -> Response:
        return answer(await to_thread.run_sync(specification))

    @routes.get("/docs")
    @routes.get("/redoc")
    async def get_docs() -> Response:
        return Response(await to_thread.run_sync(_page), media_type="text/html", headers=_NOTHING_ELSE)

    return routes


@cache
def _page() -> str:
    rows = []
    for path, item in specification()["paths"].items():
        for method, operation in item.items():
            if method in ("get", "post", "put", "patch", "delete"):
                prefix = "" if operation.get("x-root-only") else "/v1"
                rows.append(
                    f"<tr><td>{method.upper()}</td><td><code>{escape(prefix + path)}</code></td>"
                    f"<td>{escape(operation.get('summary') or operation['operationId'])}</td></tr>"
                )
    info = specification()["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])} {escape(info['version'])}</h1>"
        '<p>The whole contract, for tools: <a href="/openapi.json">openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table></html>"
    )
