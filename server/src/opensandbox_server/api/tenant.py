# SPDX-License-Identifier: Apache-2.0
"""Whose request it is. The guard finds out from the key; the routes ask here."""

from __future__ import annotations

from starlette.requests import HTTPConnection

DEFAULT = "default"
"""Everybody, on a server without tenants."""

SCOPE = "opensandbox.tenant"


def tenant_of(request: HTTPConnection) -> str:
    """The tenant the guard let in; works for requests and for WebSockets.

    >>> await lifecycle.get(tenant_of(request), sandbox_id)  # doctest: +SKIP
    """
    tenant: str = request.scope.get(SCOPE, DEFAULT)
    return tenant
