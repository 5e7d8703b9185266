# SPDX-License-Identifier: Apache-2.0
"""The HTTP face: routes, one file per noun; who may call; one shape for every error. Thin on purpose."""
