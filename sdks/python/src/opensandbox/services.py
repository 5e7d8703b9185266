# SPDX-License-Identifier: Apache-2.0
"""The parts of a sandbox under their published names, for annotations."""

from opensandbox.commands import Commands
from opensandbox.diagnostics import Diagnostics
from opensandbox.egress import Egress
from opensandbox.files import Files as Filesystem
from opensandbox.health import Health
from opensandbox.isolation import IsolationService, IsolationSession
from opensandbox.metrics import Metrics
from opensandbox.pty import Pty

__all__ = [
    "Commands",
    "Diagnostics",
    "Egress",
    "Filesystem",
    "Health",
    "IsolationService",
    "IsolationSession",
    "Metrics",
    "Pty",
]
