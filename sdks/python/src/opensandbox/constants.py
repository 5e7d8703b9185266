# SPDX-License-Identifier: Apache-2.0
"""Numbers of the protocol, under their published names."""

from opensandbox.endpoints import EXECD_PORT

__all__ = ["DEFAULT_EXECD_PORT"]

DEFAULT_EXECD_PORT = EXECD_PORT
