# SPDX-License-Identifier: Apache-2.0
"""`osb file`: files and directories of a sandbox."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from opensandbox_cli import duration, transfer
from opensandbox_cli.failure import usage
from opensandbox_cli.options import Group, Mode, Output, Owner, Path, Paths, RawOutput, SandboxId, octal
from opensandbox_cli.screen import Form, LineForm, RawForm
from opensandbox_cli.session import Client, Session, session_of

if TYPE_CHECKING:
    from opensandbox import Sandbox
    from opensandbox.models import EntryInfo

T = TypeVar("T")

app = typer.Typer(name="file", no_args_is_help=True, help="Read, write and move files of a sandbox.")

Encoding = Annotated[str, typer.Option(help="Encoding of the file; text here is UTF-8.")]


def _inside(session: Session, sandbox_id: str, work: Callable[[Sandbox], Awaitable[T]]) -> T:
    async def connected(client: Client) -> T:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await work(sandbox)

    return session.run(connected)


@app.command()
def cat(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    encoding: Annotated[str | None, typer.Option(help="Read this encoding and write UTF-8.")] = None,
    output: RawOutput = RawForm.RAW,
) -> None:
    """Write a file to standard output, byte for byte."""
    decoder = _codec(encoding).incrementaldecoder() if encoding else None

    async def work(sandbox: Sandbox) -> None:
        write = sys.stdout.buffer.write
        async with await sandbox.files.read_bytes_stream(path) as stream:
            async for chunk in stream:
                write(decoder.decode(chunk).encode() if decoder else chunk)
        if decoder:
            write(decoder.decode(b"", final=True).encode())
        sys.stdout.buffer.flush()

    _inside(session_of(ctx), sandbox_id, work)


@app.command()
def write(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    content: Annotated[
        str | None, typer.Option("-c", "--content", help="The content. [default: standard input]")
    ] = None,
    encoding: Encoding = "utf-8",
    mode: Mode = None,
    owner: Owner = None,
    group: Group = None,
    output: Output = Form.TABLE,
) -> None:
    """Write a file, and the directories above it."""
    session = session_of(ctx)
    codec = _codec(encoding)
    if content is None and codec.name == "utf-8":
        data: object = transfer.Counted(sys.stdin.buffer, lambda count: None)  # as it is, and piece by piece
    else:
        data = codec.encode(sys.stdin.read() if content is None else content)[0]

    async def work(sandbox: Sandbox) -> None:
        from opensandbox.models import WriteEntry

        entry = WriteEntry.model_validate(
            {"path": path, "data": data, "mode": 644 if mode is None else mode, "owner": owner, "group": group}
        )
        await sandbox.files.write_files([entry])

    _inside(session, sandbox_id, work)
    session.screen.message(output, f"Written: {path}")


@app.command()
def upload(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    local_path: Annotated[str, typer.Argument(show_default=False, help="A file here; - is standard input.")],
    remote_path: Annotated[
        str, typer.Argument(show_default=False, help="Where to put it in the sandbox: a file or a directory.")
    ],
    mode: Mode = None,
    output: Output = Form.TABLE,
) -> None:
    """Send a local file into the sandbox. It keeps its permissions."""
    session = session_of(ctx)
    if remote_path.endswith("/"):
        if local_path == "-":
            raise usage(f"{remote_path} is a directory", "Name the file.")
        remote_path += local_path.rstrip("/").rpartition("/")[2]
    place = _inside(
        session,
        sandbox_id,
        lambda sandbox: transfer.upload_into(sandbox, session.screen, local_path, remote_path, mode),
    )
    session.screen.message(output, f"Uploaded: {local_path} → {place}")


@app.command()
def download(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    remote_path: Annotated[str, typer.Argument(show_default=False, help="A path in the sandbox.")],
    local_path: Annotated[
        str,
        typer.Argument(help="Where to put it: a file, a directory, or - for standard output."),
    ] = ".",
    output: Output = Form.TABLE,
) -> None:
    """Fetch a file from the sandbox. A local file is replaced only when all of it has come."""
    session = session_of(ctx)
    place = _inside(
        session, sandbox_id, lambda sandbox: transfer.download(sandbox, session.screen, remote_path, local_path)
    )
    if place not in ("-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"):
        session.screen.message(output, f"Downloaded: {remote_path} → {place}")


@app.command()
def rm(ctx: typer.Context, sandbox_id: SandboxId, paths: Paths, output: Output = Form.TABLE) -> None:
    """Delete files; those that do not exist are passed over."""
    session = session_of(ctx)
    _inside(session, sandbox_id, lambda sandbox: sandbox.files.delete_files(paths))
    _show_done(session, output, paths, "deleted")


@app.command()
def rmdir(ctx: typer.Context, sandbox_id: SandboxId, paths: Paths, output: Output = Form.TABLE) -> None:
    """Delete directories with all that is in them."""
    session = session_of(ctx)
    _inside(session, sandbox_id, lambda sandbox: sandbox.files.delete_directories(paths))
    _show_done(session, output, paths, "removed")


@app.command()
def mkdir(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    paths: Paths,
    mode: Mode = None,
    owner: Owner = None,
    group: Group = None,
    output: Output = Form.TABLE,
) -> None:
    """Create directories, and those above them."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> None:
        from opensandbox.models import WriteEntry

        chosen = 755 if mode is None else mode
        entries = [WriteEntry(path=path, mode=chosen, owner=owner, group=group) for path in paths]
        await sandbox.files.create_directories(entries)

    _inside(session, sandbox_id, work)
    _show_done(session, output, paths, "created")


@app.command()
def mv(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    source: Annotated[str, typer.Argument(show_default=False, help="From.")],
    destination: Annotated[str, typer.Argument(show_default=False, help="To.")],
    output: Output = Form.TABLE,
) -> None:
    """Rename a file or directory inside the sandbox."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> None:
        from opensandbox.models import MoveEntry

        await sandbox.files.move_files([MoveEntry(src=source, dest=destination)])

    _inside(session, sandbox_id, work)
    session.screen.message(output, f"Moved: {source} → {destination}")


@app.command()
def chmod(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    mode: Annotated[
        int, typer.Option(metavar="MODE", parser=octal, show_default=False, help="Permissions, such as 0755.")
    ],
    owner: Owner = None,
    group: Group = None,
    output: Output = Form.TABLE,
) -> None:
    """Set permissions, and owner and group where given."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> None:
        from opensandbox.models import SetPermissionEntry

        entry = SetPermissionEntry(path=path, mode=mode, owner=owner, group=group)
        await sandbox.files.set_permissions([entry])

    _inside(session, sandbox_id, work)
    session.screen.message(output, f"Permissions set: {path}")


@app.command()
def replace(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    old: Annotated[str, typer.Option(show_default=False, help="The text to look for.")],
    new: Annotated[str, typer.Option(show_default=False, help="What to put in its place.")],
    output: Output = Form.TABLE,
) -> None:
    """Replace a text in a file, everywhere it occurs."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> int:
        from opensandbox.models import ContentReplaceEntry

        entry = ContentReplaceEntry(path=path, old_content=old, new_content=new)
        return sum(result.replaced_count for result in await sandbox.files.replace_contents_detailed([entry]))

    count = _inside(session, sandbox_id, work)
    if output == Form.TABLE:
        session.screen.text(f"Replaced in: {path} ({count} {'time' if count == 1 else 'times'})")
    else:
        session.screen.data(output, {"status": "ok", "message": f"Replaced in: {path}", "replaced_count": count})


@app.command()
def search(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    pattern: Annotated[
        str, typer.Option("-p", "--pattern", show_default=False, help="A glob for the name, such as '*.py'.")
    ],
    output: Output = Form.TABLE,
) -> None:
    """Find files below a directory by their names."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> list[EntryInfo]:
        from opensandbox.models import SearchEntry

        return await sandbox.files.search(SearchEntry(path=path, pattern=pattern))

    _show_entries(session, output, _inside(session, sandbox_id, work), "Nothing found.")


@app.command()
def info(ctx: typer.Context, sandbox_id: SandboxId, paths: Paths, output: Output = Form.TABLE) -> None:
    """Show what is known about files and directories."""
    session = session_of(ctx)
    found = _inside(session, sandbox_id, lambda sandbox: sandbox.files.get_file_info(paths))
    _show_entries(session, output, list(found.values()), "Nothing found.")


@app.command()
def ls(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Annotated[str, typer.Argument(help="A directory in the sandbox.")] = "/",
    depth: Annotated[int, typer.Option("-d", "--depth", min=1, help="How deep; 1 is its own entries.")] = 1,
    output: Output = Form.TABLE,
) -> None:
    """List a directory."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> list[EntryInfo]:
        from opensandbox.models import DirectoryListEntry

        return await sandbox.files.list_directory(DirectoryListEntry(path=path, depth=depth))

    _show_entries(session, output, _inside(session, sandbox_id, work), "It is empty.")


@app.command()
def watch(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    path: Path,
    recursive: Annotated[bool, typer.Option("-r", "--recursive", help="With the directories below it.")] = False,
    output: Annotated[
        LineForm, typer.Option("-o", "--output", help="raw: words; json: an object a line.")
    ] = LineForm.RAW,
) -> None:
    """Show what happens to files, a line each, until Ctrl-C."""
    session = session_of(ctx)

    async def work(sandbox: Sandbox) -> None:
        async with await sandbox.files.watch(path, recursive=recursive) as changes:
            session.detail("watching")
            async for change in changes:
                if output == LineForm.JSON:
                    session.screen.line(change.model_dump(mode="json", exclude_none=True))
                else:
                    session.screen.text(
                        " ".join(filter(None, [change.type, change.path, change.to and f"→ {change.to}"]))
                    )

    _inside(session, sandbox_id, work)


def _show_entries(session: Session, form: Form, entries: Sequence[EntryInfo], empty: str) -> None:
    now = datetime.now(UTC)
    rows = [
        [
            entry.path,
            entry.entry_type or "-",
            f"{entry.mode:04}",
            f"{entry.owner}:{entry.group}",
            entry.size,
            duration.relative(entry.modified_at, now),
        ]
        for entry in entries
    ]
    data = [entry.model_dump(mode="json") for entry in entries]
    session.screen.rows(form, ["path", "type", "mode", "owner", "size", "modified"], rows, data, empty=empty)


def _show_done(session: Session, form: Form, paths: list[str], status: str) -> None:
    rows = [{"path": path, "status": status} for path in paths]
    session.screen.rows(form, ["path", "status"], [list(row.values()) for row in rows], rows, empty="")


def _codec(name: str) -> codecs.CodecInfo:
    try:
        return codecs.lookup(name)
    except LookupError:
        raise typer.BadParameter(f"there is no encoding {name!r}", param_hint="--encoding") from None
