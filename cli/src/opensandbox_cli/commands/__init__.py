# SPDX-License-Identifier: Apache-2.0
"""The commands, one file for each noun: parse, call the SDK, show."""
