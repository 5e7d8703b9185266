# SPDX-License-Identifier: Apache-2.0
"""The Python kernel of code contexts: a warm parent that forks one process per context.

execd starts it with one end of a socket pair as descriptor 3. The parent imports what cells usually need and then only
forks: each line `{"op": "context", "id": ...}` comes with three descriptors (control, stdout, stderr), and the child that
takes them is the context. So a new context costs a fork, not an interpreter.

A context speaks JSON lines on its control socket. It hears `{"op": "run", "code": ...}` and answers with any number of
`display` and `result` lines (`data`: mime type to content), perhaps an `error` (`ename`, `evalue`, `traceback`), and
exactly one `done` (`count`). What a cell prints, or a program it starts, goes through the two pipes as it is: before each
line the kernel flushes, and execd empties the pipes before it looks at the line, so that their order holds.

An interrupt is SIGINT. Nothing a cell does can harm more than its own context: the control socket is not inherited by
programs, and a process that the cell forks does not speak on it.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import io
import json
import linecache
import os
import signal
import socket
import sys
import traceback
import types

CONTROL = 3
# What most first cells import anyway. Nothing that starts a thread: threads do not survive a fork.
WARM = ("asyncio", "collections", "datetime", "functools", "itertools", "json", "math", "pathlib", "random", "re",
        "subprocess", "textwrap", "time", "typing", "urllib.parse")  # fmt: skip
LARGEST_TEXT = 1 << 20
RICH = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
    "_repr_latex_": "text/latex",
}


def parent(control: socket.socket) -> None:
    """Fork a context for every line, until execd closes its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps contexts; execd sees them end by their socket
    for name in WARM:
        importlib.import_module(name)
    send(control, {"type": "ready", "pid": os.getpid(), "version": sys.version.split()[0]})
    while True:
        line, files, _, _ = socket.recv_fds(control, 4096, 3)
        if not line:
            return
        if len(files) == 3 and os.fork() == 0:
            control.close()
            context(files)
            os._exit(0)
        for file in files:
            os.close(file)


def context(files: list[int]) -> None:
    """What the child does: one context, until execd closes the socket."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((null, *files[1:]), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    control = socket.socket(fileno=files[0])
    control.set_inheritable(False)
    sys.stdin = Refusing()
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(1, "w", closefd=False)), "utf-8", "surrogateescape", line_buffering=True
    )
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(io.FileIO(2, "w", closefd=False)), "utf-8", "backslashreplace", write_through=True
    )
    Context(control).serve()


class Refusing(io.TextIOBase):
    """Standard input of a cell: there is nobody to ask, and waiting for ever would help no one."""

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> str:
        raise EOFError("a code context has no standard input: put the value into the code, or into a file")

    def readline(self, size: int = -1) -> str:  # type: ignore[override]
        return self.read()


class Context:
    """One namespace, and the cells that run in it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.pid = os.getpid()
        self.count = 0
        self.module = types.ModuleType("__main__")
        self.module.__dict__.update({"__builtins__": builtins, "display": self.display})
        sys.modules["__main__"] = self.module
        sys.path[0:0] = [""]
        sys.argv = [""]
        self.loop: object = None

    def serve(self) -> None:
        lines = self.control.makefile("rb")
        self.tell({"type": "ready", "pid": self.pid, "version": sys.version.split()[0]})
        while True:
            try:
                line = lines.readline()
                if not line:
                    return
                wish = json.loads(line)
                if wish.get("op") == "run":
                    self.run(wish["code"])
            except KeyboardInterrupt:
                continue  # it came between two cells

    def run(self, code: str) -> None:
        self.count += 1
        try:
            try:
                self.execute(code)
            except BaseException as error:
                # Also SystemExit: a cell that leaves does not take the context along.
                if os.getpid() != self.pid:
                    raise
                self.report(error)
            self.flush()
        finally:
            if os.getpid() != self.pid:
                self.flush()
                os._exit(0)  # a process that the cell forked and that came back to us
        while True:
            try:
                self.tell({"type": "done", "count": self.count})
                return
            except KeyboardInterrupt:
                continue

    def execute(self, code: str) -> None:
        name = f"<cell {self.count}>"
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(code, name, "exec", flags | ast.PyCF_ONLY_AST, dont_inherit=True)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) and not silent(code) else None
        if tree.body:
            self.evaluate(compile(tree, name, "exec", flags, dont_inherit=True))
        if last is not None:
            value = self.evaluate(compile(ast.Expression(last.value), name, "eval", flags, dont_inherit=True))
            if value is not None:
                self.module.__dict__["_"] = value
                self.show("result", value)

    def evaluate(self, compiled: types.CodeType) -> object:
        value = eval(compiled, self.module.__dict__)
        if compiled.co_flags & inspect.CO_COROUTINE:
            import asyncio

            if self.loop is None:
                self.loop = asyncio.new_event_loop()
                asyncio.set_event_loop(self.loop)
            return self.loop.run_until_complete(value)
        return value

    def display(self, *values: object) -> None:
        """Show values as results do, in the middle of a cell."""
        for value in values:
            self.show("display", value)

    def show(self, kind: str, value: object) -> None:
        if os.getpid() == self.pid:
            data = bundle(value)
            self.flush()
            self.tell({"type": kind, "data": data, "count": self.count})

    def report(self, error: BaseException) -> None:
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next  # ours
        shown = traceback.TracebackException(type(error), error, frames, compact=True)
        try:
            text = str(error)
        except Exception:
            text = "<the exception cannot be shown>"
        self.flush()
        self.tell(
            {
                "type": "error",
                "ename": type(error).__name__,
                "evalue": text[:LARGEST_TEXT],
                "traceback": "".join(shown.format())[-LARGEST_TEXT:].splitlines(),
            }
        )

    def flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except Exception:  # noqa: S110 - the cell may have closed or replaced it
                pass

    def tell(self, line: dict[str, object]) -> None:
        send(self.control, line)


def silent(code: str) -> bool:
    """A semicolon at the end asks for no result, as notebooks have it."""
    return code.rstrip().endswith(";")


def bundle(value: object) -> dict[str, object]:
    """The value as text, and in every richer form it offers."""
    data: dict[str, object] = {}
    for method, mime in RICH.items():
        try:
            offered = getattr(type(value), method, None)
            content = offered(value) if offered else None
        except Exception:
            content = None  # a form that cannot be made is not offered
        if isinstance(content, tuple):
            content = content[0]
        if isinstance(content, bytes):
            import base64

            content = base64.b64encode(content).decode()
        if content is not None:
            data[mime] = content
    text = repr(value)
    data["text/plain"] = text if len(text) <= LARGEST_TEXT else text[:LARGEST_TEXT] + "…"
    return data


def send(control: socket.socket, line: dict[str, object]) -> None:
    control.sendall(json.dumps(line, default=repr).encode("utf-8", "backslashreplace") + b"\n")


if __name__ == "__main__":
    parent(socket.socket(fileno=CONTROL))
