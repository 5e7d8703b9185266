# SPDX-License-Identifier: Apache-2.0
"""`python -m opensandbox_cli`."""

from opensandbox_cli.main import cli

cli()
