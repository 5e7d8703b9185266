# SPDX-License-Identifier: Apache-2.0
"""The parts of a sandbox under their published names, for annotations."""

from opensandbox.commands import Commands
from opensandbox.diagnostics import Diagnostics
from opensandbox.egress import Egress
from opensandbox.files import Files as Filesystem
from opensandbox.health import Health
from opensandbox.metrics import Metrics

__all__ = ["Commands", "Diagnostics", "Egress", "Filesystem", "Health", "Metrics"]
