# SPDX-License-Identifier: Apache-2.0
"""The published import path of `SandboxManager`; it lives in `opensandbox.sandboxes`."""

from opensandbox.sandboxes import SandboxManager

__all__ = ["SandboxManager"]
