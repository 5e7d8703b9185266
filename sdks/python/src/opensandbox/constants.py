# SPDX-License-Identifier: Apache-2.0
"""Numbers of the protocol, under their published names."""

from datetime import timedelta

from opensandbox.endpoints import EXECD_PORT

__all__ = ["CLEANUP_LIMIT", "DEFAULT_EXECD_PORT"]

DEFAULT_EXECD_PORT = EXECD_PORT
# Cleaning up must not hang the error that it comes after.
CLEANUP_LIMIT = timedelta(seconds=10)
