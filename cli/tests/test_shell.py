# SPDX-License-Identifier: Apache-2.0
"""`osb shell`: a terminal there, on a terminal here."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import struct
import termios

from conftest import OSB, Osb


def test_a_terminal(osb: Osb, sandbox_id: str, environment: dict[str, str]) -> None:
    pid, screen = pty.fork()
    if pid == 0:
        os.execve(OSB, [OSB, "shell", sandbox_id, "-w", "/usr", "-e", "PS1=ready>"], {**environment, "PS1": ""})
    drawn = b""

    def until(text: bytes) -> None:
        nonlocal drawn
        while text not in drawn:
            drawn += os.read(screen, 1024)
        drawn = drawn.partition(text)[2]

    def resize(cols: int, rows: int) -> None:
        fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))

    # What is typed is shown by the other side alone, so the words that are waited for are not those that were typed.
    os.write(screen, b"echo here: $PWD; echo $((1+1))nd\r")
    until(b"here: /usr\r\n2nd")
    resize(101, 31)
    os.kill(pid, signal.SIGWINCH)
    os.write(screen, b"while test \"$(stty size)\" != '31 101'; do :; done; echo res''ized\r")
    until(b"resized\r\n")
    # Ctrl-C is a key for the program there, not an end of osb.
    os.write(screen, b"echo be''gun; sleep 1000\r")
    until(b"begun\r\n")
    os.write(screen, b"\x03")
    os.write(screen, b"exit 7\r")
    try:
        while os.read(screen, 1024):
            pass
    except OSError:
        pass  # how the end of a terminal is told
    _, status = os.waitpid(pid, 0)
    os.close(screen)
    assert os.waitstatus_to_exitcode(status) == 7


def test_input_that_is_no_terminal(osb: Osb, sandbox_id: str) -> None:
    done = osb("shell", sandbox_id, "--", "cat; exit 3", stdin=b"piped\n", code=3)
    assert b"piped\r\n" in done.stdout
    osb("shell", sandbox_id, "--", "kill -TERM $$", stdin=b"", code=128 + 15)
