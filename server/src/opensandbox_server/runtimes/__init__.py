# SPDX-License-Identifier: Apache-2.0
"""What makes sandboxes: one folder per technology, each with a pure plan and a runtime that executes it."""
