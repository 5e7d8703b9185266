# SPDX-License-Identifier: Apache-2.0
"""osb: make and use OpenSandbox sandboxes from a terminal."""

__version__ = "1.2.0"
