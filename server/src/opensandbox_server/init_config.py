# SPDX-License-Identifier: Apache-2.0
"""`opensandbox-server init-config`: write a configuration file to start from. The texts are in `config_examples/`."""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

from .errors import CannotStart

EXAMPLES = ("docker", "docker-zh", "k8s", "k8s-zh", "local")
_SKELETON = "skeleton"


def example(name: str | None) -> str:
    """The text of an example; None: every key, each commented out at its default."""
    folder = resources.files(__package__) / "config_examples"
    return (folder / f"{name or _SKELETON}.toml").read_text(encoding="utf-8")


def write(path: Path, name: str | None, *, force: bool) -> None:
    """Only its owner may read it, for it is where the API key goes. An existing file stays, unless forced."""
    text = example(name).encode()
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if force else os.O_EXCL)
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileExistsError:
        raise CannotStart(f"{path} is already there.", "Name another file, or overwrite it with --force.") from None
    except OSError as error:
        raise CannotStart(f"{path} cannot be written: {error.strerror}.", "Name a file you may write.") from None
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)
        file.write(text)
