# SPDX-License-Identifier: Apache-2.0
"""The local runtime: sandboxes on this Linux machine, made by sandboxd."""
