# SPDX-License-Identifier: Apache-2.0
"""OpenSandbox: the control plane. `create_app` in `app` is the way in; ARCHITECTURE.md is the map."""

__version__ = "1.2.0"
