# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, and the exit code it gives.

| code | meaning |
|---|---|
| 0 | it worked |
| 1 | the server or the sandbox said no, or did not answer |
| 2 | the command line or the configuration file is wrong |
| 130 | interrupted by Ctrl-C; 143 by SIGTERM |
| 141 | whoever read our output has gone |

`osb run`, `osb shell` and `osb command run`, `attach` and `session run` are different: they end with the code of the
remote command, as far as it has one.

| code | meaning |
|---|---|
| 0-255 | of the command itself; from the shell: 126 not executable, 127 not found |
| 124 | it took longer than `--timeout` and was ended |
| 128 + n | signal n ended it; 137 is also what running out of memory looks like |
| 125 | osb's own failure: wrong options, no server, no such sandbox, connection lost |
| 130, 143 | Ctrl-C or SIGTERM; the remote command has been ended too |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opensandbox_cli.screen import Screen

REFUSED = 1
USAGE = 2
TIMED_OUT = 124
OURS = 125
SIGNAL = 128
BROKEN_PIPE = 141

# Where the hint of the server speaks of requests, to those who type commands.
HINTS = {
    "COMMAND_NOT_FOUND": "`osb command run -d` prints the id of a command; it is known for 24 hours after its end.",
    "GENERAL::INVALID_REQUEST": "Correct what is named; --help tells what each option takes.",
    "GENERAL::NOT_FOUND": "The server is older than osb, or something else answers there.",
}

# Commands whose exit code belongs to somebody else, so that ours must be told apart.
PASSES_CODE_ON = {"osb run", "osb shell", "osb command run", "osb command attach", "osb command session run"}


class Failure(Exception):
    """An error of this program, told in one line."""

    def __init__(self, message: str, hint: str | None = None, code: int = REFUSED) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def usage(message: str, hint: str | None = None) -> Failure:
    """The command line, or the configuration, asks for something that makes no sense."""
    return Failure(message, hint, USAGE)


def show(error: Exception, screen: Screen, server: str) -> int:
    """Tell what happened; the exit code."""
    if isinstance(error, Failure):
        screen.error(str(error), error.hint)
        return error.code
    from opensandbox.exceptions import (
        InvalidArgumentException,
        SandboxConnectionException,
        SandboxException,
        SandboxTimeoutException,
    )

    if isinstance(error, SandboxException):
        facts = [f"code {error.code}"]
        if error.status:
            facts.append(f"HTTP {error.status}")
        if error.request_id:
            facts.append(f"request {error.request_id}")
        message, hint = error.message.removeprefix("body."), HINTS.get(error.code, error.hint)
        if isinstance(error, SandboxConnectionException) and server in message and "cannot connect" in message:
            if (refused := _tls_failure(error, server)) is not None:
                screen.error(*refused)
                return REFUSED
            message = f"no server at {server}"
            hint = (
                "Start one with `opensandbox-server`, or name another with --domain"
                " or `osb config set connection.domain`."
            )
            facts = []
        elif isinstance(error, SandboxTimeoutException):
            hint = "Give it more time with --request-timeout."
        elif error.code == "MISSING_API_KEY" or error.status == 401:
            hint = "Give a key with --api-key, OPEN_SANDBOX_API_KEY, or `osb config set connection.api_key`."
        screen.error(message, hint, facts)
        return USAGE if isinstance(error, InvalidArgumentException) else REFUSED
    if isinstance(error, OSError) and error.strerror:
        screen.error(f"{error.filename}: {error.strerror}" if error.filename else error.strerror)
        return REFUSED
    screen.error(
        f"{type(error).__name__}: {error}" if str(error) else type(error).__name__,
        "This is a mistake in osb; -v -v shows where.",
    )
    return REFUSED


def _tls_failure(error: BaseException, server: str) -> tuple[str, str] | None:
    """What to tell when somebody answers there, but https could not be agreed on: the message and a hint."""
    import ssl

    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {server} is not trusted: {cause.verify_message}",
            "SSL_CERT_FILE names a file with further authorities to trust.",
        )
    return (
        f"what answers at {server} does not speak https",
        "Try --protocol http, or `osb config set connection.protocol http`.",
    )
