# SPDX-License-Identifier: Apache-2.0
"""The Python kernel of code contexts: a warm parent that forks one process per context.

execd starts it with one end of a packet socket as descriptor 3. The parent imports what cells usually need and then
only forks: each packet `{"op": "context", "id": ...}` brings four descriptors (control, stdout, stderr, directory), and
the child that takes them is the context. So a new context costs a fork, not an interpreter. The parent answers
`forked` (`id`, `pid`) or `refused` (`id`, `reason`), and later `ended` (`id`, `status` as wait gives it).

A context speaks JSON lines on its control socket. The first it hears is `{"op": "begin", "env": ...}`, each cell is
`{"op": "run", "count": N, "code": ..., "env": ...}`. It answers with any number of `display` and `result` lines
(`data`: mime type to content), perhaps an `error` (`ename`, `evalue`, `traceback`), and exactly one `done`, each with
the cell's `count`. What a cell prints, or a program it starts, goes through the two pipes as it is: before each line
the kernel flushes, and execd empties the pipes before it looks at the line, so that their order holds.

An interrupt is SIGINT. The control socket is not inherited by programs, a process that the cell forks does not speak on
it, and nothing that lies about in the sandbox is imported by the parent: execd starts it with -I, and each context gets
back what that takes away. This is no wall between contexts. They run as the same user, and whoever may trace or write
the memory of another process of that user (ptrace, /proc/PID/mem) can do it to other contexts and to the parent. Code
that must not meet belongs into different sandboxes.

It runs on every Python since 3.9: the image decides which one that is.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib
import inspect
import io
import json
import linecache
import os
import resource
import signal
import site
import socket
import sys
import threading
import traceback
import types

CONTROL = 3
# What most first cells import anyway. Nothing that starts a thread: threads do not survive a fork.
WARM = ("asyncio", "collections", "csv", "datetime", "functools", "itertools", "json", "math", "pathlib", "random",
        "re", "subprocess", "tempfile", "textwrap", "time", "typing", "urllib.parse")  # fmt: skip
LARGEST_TEXT = 1 << 20
# execd takes lines of 8 MiB.
LARGEST_LINE = 7 << 20
LONGEST_TRACEBACK = 1000  # lines; execd takes no more
RICH = {
    "_repr_html_": "text/html",
    "_repr_markdown_": "text/markdown",
    "_repr_svg_": "image/svg+xml",
    "_repr_png_": "image/png",
    "_repr_jpeg_": "image/jpeg",
    "_repr_json_": "application/json",
    "_repr_latex_": "text/latex",
}
OWN = inspect.currentframe().f_code.co_filename  # type: ignore[union-attr]


def parent(control: socket.socket) -> None:
    """Fork a context for every packet, until execd closes its end."""
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in WARM:
        importlib.import_module(name)
    names: dict[int, str] = {}

    def collect(*_: object) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in names:
                tell_execd({"type": "ended", "id": names.pop(pid), "status": status})

    def tell_execd(packet: dict[str, object]) -> None:
        control.send(json.dumps(packet).encode())

    gc.collect()
    gc.freeze()  # a collection in a context does not copy the pages of what all share
    tell_execd({"type": "ready", "version": sys.version.split()[0]})
    signal.signal(signal.SIGCHLD, collect)
    while True:
        packet, files, _, _ = socket.recv_fds(control, 4096, 4)
        if not packet:
            return
        name = json.loads(packet)["id"]
        # Its end must not be noticed before its name is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            os.fchdir(files[3])  # here already: once it is forked, a context is where it should be
            pid = os.fork()
        except OSError as error:
            tell_execd({"type": "refused", "id": name, "reason": error.strerror})
            pid = -1
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            control.close()
            try:
                context(files)
            finally:
                os._exit(0)
        if pid > 0:
            names[pid] = name
            tell_execd({"type": "forked", "id": name, "pid": pid})
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        os.chdir("/")
        for file in files:
            os.close(file)


def context(files: list[int]) -> None:
    """What the child does: one context, until execd closes the socket."""
    os.setsid()
    os.close(files[3])
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((null, *files[1:3]), (0, 1, 2)):  # noqa: B905 - strict is unknown before 3.10
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
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = None, sys.stdout, sys.stderr  # type: ignore[misc]
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
        sys.path.insert(0, "")
        sys.argv = [""]
        self.loop: object = None
        self.speaking = threading.Lock()
        # An interrupt counts while a cell runs. One that comes while a line is being sent waits for the line's end.
        self.running = False
        self.sending = False
        self.interrupted = False
        signal.signal(signal.SIGINT, self.interrupt)

    def interrupt(self, *_: object) -> None:
        if self.sending:
            self.interrupted = True
        elif self.running:
            raise KeyboardInterrupt

    def serve(self) -> None:
        lines = self.control.makefile("rb")
        while True:
            line = lines.readline()
            if not line:
                return
            wish = json.loads(line)
            if wish["op"] == "begin":
                self.begin(wish)
            elif wish["op"] == "run":
                self.run(wish)

    def begin(self, wish: dict[str, object]) -> None:
        """Take the environment that programs of the sandbox have now; the parent's may be older."""
        env: dict[str, str] = wish["env"]  # type: ignore[assignment]
        for name in [name for name in os.environ if name not in env]:
            del os.environ[name]
        os.environ.update(env)
        for place in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
            if place and place not in sys.path:
                sys.path.insert(1, place)
        if not env.get("PYTHONNOUSERSITE") and sys.prefix == sys.base_prefix:
            add_user_site()
        sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
        mark = int(wish.get("mark", 0))  # type: ignore[call-overload]
        if mark:
            # All that comes out of this context inherits it, and execd finds it by that. See node/spawn/mark.go.
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))

    def run(self, wish: dict[str, object]) -> None:
        self.count = wish["count"]  # type: ignore[assignment]
        os.environ.update(wish.get("env") or {})  # type: ignore[call-overload]
        problem: BaseException | None
        try:
            problem = self.attempt(str(wish["code"]))
        except KeyboardInterrupt as late:  # it came when the cell had just ended
            self.running = False
            problem = late
        if os.getpid() != self.pid:
            # A process that the cell forked and that came back to us.
            self.flush()
            code = problem.code if isinstance(problem, SystemExit) else int(problem is not None)
            os._exit(code if isinstance(code, int) else 0 if code is None else 1)
        if problem is not None:
            self.report(problem)
        self.flush()
        self.tell({"type": "done"})

    def attempt(self, code: str) -> BaseException | None:
        try:
            self.running = True
            self.execute(code)
            self.running = False
            return None
        except BaseException as error:
            # Also SystemExit: a cell that leaves does not take the context along.
            self.running = False
            return error

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
        value = eval(compiled, self.module.__dict__)  # noqa: S307 - it is what this program is for
        if not compiled.co_flags & inspect.CO_COROUTINE:
            return value
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            asyncio.set_event_loop(self.loop)
        task = self.loop.create_task(value)  # type: ignore[attr-defined]
        try:
            return self.loop.run_until_complete(task)  # type: ignore[attr-defined]
        except BaseException:
            # Left as it is, an interrupted one would go on in the next cell.
            if task.cancel():
                with_problem = asyncio.gather(task, return_exceptions=True)
                self.loop.run_until_complete(with_problem)  # type: ignore[attr-defined]
            raise

    def display(self, *values: object) -> None:
        """Show values as results do, in the middle of a cell."""
        for value in values:
            self.show("display", value)

    def show(self, kind: str, value: object) -> None:
        data = bundle(value)
        self.flush()
        self.tell({"type": kind, "data": data})

    def report(self, error: BaseException) -> None:
        try:
            text = str(error)
        except Exception:
            text = "<the exception cannot be shown>"
        try:
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename == OWN:
                frames = frames.tb_next  # ours
            if isinstance(error, SyntaxError) and frames is not None and frames.tb_next is None and not error.text:
                frames = None
            lines = "".join(traceback.format_exception(type(error), error, frames))[-LARGEST_TEXT:].splitlines()
            if len(lines) > LONGEST_TRACEBACK:
                lines = [*lines[:100], "  ...", *lines[101 - LONGEST_TRACEBACK :]]
        except Exception:
            lines = []
        self.flush()
        self.tell({"type": "error", "ename": type(error).__name__, "evalue": text[:LARGEST_TEXT], "traceback": lines})

    def flush(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the cell may have closed or replaced it
                stream.flush()

    def tell(self, line: dict[str, object]) -> None:
        """Send a line, whole: neither an interrupt nor another thread comes between."""
        if os.getpid() != self.pid:
            return
        with self.speaking:
            self.sending = True
            try:
                self.control.sendall(encoded({**line, "count": self.count}))
            finally:
                self.sending = False
        if self.interrupted:
            self.interrupted = False
            if self.running:
                raise KeyboardInterrupt


def add_user_site() -> None:
    """Packages of the user come before those of the system, as in a Python that is started without -I."""
    site.ENABLE_USER_SITE, site.USER_BASE, site.USER_SITE = True, None, None  # HOME may be another one now
    before = list(sys.path)
    place = site.getusersitepackages()
    if os.path.isdir(place):
        site.addsitedir(place)
    added = [path for path in sys.path if path not in before]
    system = [path.endswith(("site-packages", "dist-packages")) for path in before]
    at = system.index(True) if True in system else len(before)
    sys.path[:] = before[:at] + added + before[at:]


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


def encoded(line: dict[str, object]) -> bytes:
    """A line as bytes. Forms of a value that execd would not take are left out, the largest first, and that is said."""
    while True:
        text = json.dumps(line, ensure_ascii=False, default=repr).encode("utf-8", "backslashreplace") + b"\n"
        data = line.get("data")
        if len(text) <= LARGEST_LINE or not isinstance(data, dict):
            return text
        largest = max(data, key=lambda mime: len(str(data[mime])))
        data["text/plain"] = f"<{largest} of {len(str(data[largest]))} characters is too large to be shown>"
        if largest != "text/plain":
            del data[largest]


if __name__ == "__main__":
    parent(socket.socket(fileno=CONTROL))
