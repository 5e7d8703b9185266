# SPDX-License-Identifier: Apache-2.0
"""A runtime that makes nothing, for tests."""

from .runtime import FakeRuntime

__all__ = ["FakeRuntime"]
