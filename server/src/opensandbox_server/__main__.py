# SPDX-License-Identifier: Apache-2.0
"""`opensandbox-server`: read the configuration, put the parts together, serve.

Heavy imports happen after the checks, so that a refusal and `--help` come at once.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .errors import CannotStart, OpenSandboxError
from .init_config import EXAMPLES, write

if TYPE_CHECKING:
    import socket

    from .config import Loaded
    from .runtimes.local.plan import Settings
    from .runtimes.local.runtime import LocalRuntime
    from .statedir import StateDir
    from .tenants import Tenants

_EPILOG = """\
examples:
  opensandbox-server                        serve on 127.0.0.1 and ::1, port 8080, without a configuration
  opensandbox-server --port 9000            the same on another port
  opensandbox-server --config sandbox.toml  read a configuration file
  opensandbox-server init-config            write a configuration file to start from
  opensandbox-server down                   stop the server; sandboxes live on
  opensandbox-server down --all             stop the server and end all its sandboxes

The configuration file is --config, else $SANDBOX_CONFIG_PATH, else ~/.sandbox.toml, else none.
The state directory is --state-dir, else $OPENSANDBOX_STATE_DIR, else [server] state_dir, else
/var/lib/opensandbox for root and ~/.local/share/opensandbox for others.
The API key is $OPENSANDBOX_SERVER_API_KEY, else [server] api_key; loopback needs none.
"""


BEYOND_LOOPBACK = (
    "ingress opens execd's port only, as this is not loopback; clients reach other ports of sandboxes through this "
    "server (use_server_proxy)."
)


def main(arguments: list[str] | None = None) -> int:
    """The program. Returns its exit code: 0 after an ordinary end, 1 when it could not start, 2 for wrong usage."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(words)
        if options.command == "init-config":
            return _init_config(options)
        if sys.platform != "linux":
            raise CannotStart(
                f"The local runtime needs Linux; this is {platform.system()}.",
                "Run the server on a Linux machine or virtual machine; clients run anywhere.",
            )
        return _down(options) if options.command == "down" else _serve(options)
    except (CannotStart, OpenSandboxError) as error:
        print(f"opensandbox-server: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    shared = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    shared.add_argument("--config", type=Path, metavar="FILE", help="configuration file (TOML)")
    shared.add_argument("--state-dir", type=Path, metavar="DIR", help="directory of database, key and sandboxes")
    parser = argparse.ArgumentParser(
        prog="opensandbox-server",
        usage="%(prog)s [--config FILE] [--state-dir DIR] [--host ADDRESS] [--port N]\n"
        "       %(prog)s down [--all] [--config FILE] [--state-dir DIR]\n"
        "       %(prog)s init-config [FILE] [--example NAME] [--force]",
        description="Makes and serves sandboxes: isolated places to run code, on this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[shared],
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: localhost)")
    parser.add_argument("--port", type=int, metavar="N", help="port to listen on (default: 8080; 0: any free one)")
    parser.add_argument("--version", action="version", version=f"opensandbox-server {__version__}")
    commands = parser.add_subparsers(dest="command", title="commands", prog="opensandbox-server")
    stop = commands.add_parser(
        "down", parents=[shared], help="stop the server that runs on the state directory", description=_DOWN
    )
    stop.add_argument("--all", action="store_true", help="end all its sandboxes too")
    begin = commands.add_parser(
        "init-config", help="write a configuration file to start from", description=_INIT_CONFIG
    )
    begin.add_argument("file", nargs="?", type=Path, metavar="FILE", help="where to (default: ~/.sandbox.toml)")
    begin.add_argument("--example", choices=EXAMPLES, help="for which runtime (default: all keys, commented out)")
    begin.add_argument("--force", action="store_true", help="overwrite the file if it is there")
    return parser


_INIT_CONFIG = "Write a commented configuration file. No file is needed to start: every key has a default."
_DOWN = "Stop the server that runs on the state directory. Sandboxes live on, unless --all is given."


def _init_config(options: argparse.Namespace) -> int:
    from .config import load

    file = (options.file or Path.home() / ".sandbox.toml").expanduser()
    write(file, options.example, force=options.force)
    print(f"Wrote {file}.")
    try:
        load(file)
    except CannotStart as error:
        _line("note", f"{error.message.removeprefix(f'{file}: ')} {error.hint}")
    else:
        named = "" if options.file is None else f" --config {options.file}"
        print(f"Start with: opensandbox-server{named}")
    return 0


def _load(options: argparse.Namespace) -> Loaded:
    from .config import load

    given = {key: value for key in ("host", "port", "state_dir") if (value := getattr(options, key, None)) is not None}
    return load(getattr(options, "config", None), overrides=given)


def _state_path(loaded: Loaded) -> Path:
    from .statedir import default_path

    return (loaded.config.server.state_dir or default_path()).expanduser().absolute()


def _down(options: argparse.Namespace) -> int:
    from .down import down

    loaded = _load(options)
    return down(_state_path(loaded), loaded.config.local, everything=options.all)


def _serve(options: argparse.Namespace) -> int:
    started = time.monotonic()
    # What is imported stays for good: nothing of it is worth the collector's time. And pydantic need not search every
    # installed package for plugins. Together a fifth of the start.
    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
    loaded = _load(options)
    from . import logs, serve, statedir

    print(f"opensandbox-server {__version__}")
    _line("config", str(loaded.file) if loaded.file else "no file, defaults")
    for note in loaded.notes:
        _line("note", note)
    tenants = _tenants(loaded)
    state = statedir.open_state(_state_path(loaded))
    server = loaded.config.server
    with statedir.locked(state.path) as lock:
        database = (loaded.config.store.path or state.database).expanduser().absolute()
        sockets = serve.bind(server.hosts, server.port, server.backlog)
        lock.tell(serve.url(sockets))
        logs.start(loaded.config.log.level, loaded.config.log.format)

        import uvloop

        uvloop.run(_run(loaded, state, database, sockets, tenants, started))
    return 0


def _tenants(loaded: Loaded) -> Tenants | None:
    if loaded.config.tenants.provider is None:
        return None
    from .config import tenants_file
    from .tenants import Tenants

    file = tenants_file()
    tenants = Tenants(file)
    _line("tenants", str(file))
    return tenants


async def _run(
    loaded: Loaded,
    state: StateDir,
    database: Path,
    sockets: list[socket.socket],
    tenants: Tenants | None,
    started: float,
) -> None:
    """The wiring: store and runtime into the application, the application onto the sockets."""
    from . import serve
    from .admission import Bounds
    from .app import Deps, create_app
    from .runtimes.local.runtime import LocalRuntime
    from .store import open_store

    config = loaded.config
    stop = serve.Stop()
    stop.listen()
    runtime = LocalRuntime(_local_settings(loaded, state, sockets))
    node = state.instance
    async with open_store(database, node=node, runtime=runtime.name, instance=state.instance) as store:
        app = create_app(
            Deps(
                store=store,
                runtime=runtime,
                key=state.key,
                node=node,
                epoch=store.epoch,
                api_key=config.server.api_key.get_secret_value() if config.server.api_key else None,
                loopback=config.server.loopback,
                cors_origins=config.server.cors_origins,
                max_timeout=config.server.max_sandbox_timeout_seconds,
                tenants=tenants,
                bounds=Bounds(config.server.max_sandboxes, config.server.max_creating, config.server.max_waiting),
                public_host=config.server.eip,
                page_sandbox=config.proxy.page_sandbox,
                grace=config.server.timeout_graceful_shutdown,
            )
        )

        stop.first = app.state.stopping

        def ready() -> None:
            gc.freeze()
            gc.enable()
            _line("api", f"{serve.url(sockets)}{_other_addresses(sockets)}")
            _line("ingress", runtime.public_address())
            if not config.server.loopback:
                _line("note", BEYOND_LOOPBACK)
            _line("state", f"{state.path} (instance {state.instance[:8]})")
            _tell_runtime(runtime)
            found = app.state.found
            if any(vars(found).values()):
                _line("sandboxes", f"{found} since the last server")
            print(
                f"Ready after {time.monotonic() - started:.2f} s. Ctrl-C stops the server; sandboxes live on.",
                flush=True,
            )

        async with app.router.lifespan_context(app):
            await serve.serve(app, sockets, config.server, stop, ready)
    print(
        # True also when it is `down --all` that stops us: that ends them next.
        "Stopped; sandboxes live on until `opensandbox-server down --all` ends them."
        if runtime.left_behind
        else "Stopped."
    )


def _local_settings(loaded: Loaded, state: StateDir, sockets: list[socket.socket]) -> Settings:
    from . import serve, statedir
    from .runtimes.local.plan import Settings
    from .runtimes.local.sandboxd import binary, pip_directory

    server, local = loaded.config.server, loaded.config.local
    return Settings(
        state_dir=state.path,
        run_dir=statedir.run_dir(state.instance, local.run_dir),
        instance=state.instance,
        sandboxd=binary("sandboxd"),
        ingress=binary("ingress"),
        pip_dir=pip_directory(state.path),
        free_space_reserve=local.free_space_reserve,
        require_full_isolation=local.require_full_isolation,
        ingress_hosts=tuple(bound.getsockname()[0] for bound in sockets),
        ingress_port=local.ingress_port,
        public_host=serve.public_host(server),
        log_level=loaded.config.log.level,
    )


def _tell_runtime(runtime: LocalRuntime) -> None:
    host = runtime.host
    if host is None:
        return
    how = "rootless" if host.rootless else "root"
    _line("runtime", f"{runtime.name}: Linux {host.kernel}, cgroup {host.cgroup.value}, {how}")
    _line("isolation", "in part; this host does not enforce:" if host.missing else "full")
    for missing in host.missing:
        _line("", f"- {missing}")


def _other_addresses(sockets: list[socket.socket]) -> str:
    others = [bound.getsockname()[0] for bound in sockets[1:]]
    return f" (also [{'], ['.join(others)}])" if others else ""


def _line(name: str, text: str) -> None:
    print(f"  {name:<10} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
