# SPDX-License-Identifier: Apache-2.0
"""What is shown, and how: tables for people, JSON and YAML for programs.

Names, metadata and messages come from servers and sandboxes, where anybody may have written them. Whatever is shown
as part of our own display goes through `visible` first, so that it cannot move the cursor, change colours or reorder
text. Output of commands and content of files are not ours: they pass as they are.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# Control characters (C0, DEL, C1), line separators, and what changes the direction of text or cannot be seen.
_UNSAFE = "[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
_ANY = re.compile(_UNSAFE)
_BUT_LINES = re.compile(f"(?![\n\t]){_UNSAFE}")

_STATE_STYLES = {
    "Running": "green",
    "Pending": "yellow",
    "Paused": "yellow",
    "Failed": "red",
    "Terminated": "bright_black",
}


class Form(StrEnum):
    """How to show a result."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class TextForm(StrEnum):
    """How to show a result that is a text."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"
    RAW = "raw"


class RawForm(StrEnum):
    """For commands that have only one form."""

    RAW = "raw"


class LineForm(StrEnum):
    """For what comes line by line."""

    RAW = "raw"
    JSON = "json"


def visible(text: object, *, lines: bool = False) -> str:
    """The text with control characters written out, as `\\x1b`. `lines` keeps line breaks and tabs."""
    return (_BUT_LINES if lines else _ANY).sub(lambda match: _escaped(match.group()), str(text))


def _escaped(character: str) -> str:
    code = ord(character)
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class Screen:
    """Standard output and standard error, with or without colours.

    When standard output is no terminal, a table is plain columns: nothing is cut off, folded or coloured, and no
    lines are drawn.
    """

    def __init__(self, color: bool | None = None) -> None:
        """`color`: None leaves it to the terminal and `NO_COLOR`."""
        self._color = color

    # --- results ------------------------------------------------------------------------------------

    def rows(
        self, form: str, columns: Sequence[str], rows: Sequence[Sequence[object]], data: object, *, empty: str
    ) -> None:
        """Several things of a kind. `data` is what programs get."""
        if form != Form.TABLE:
            self.data(form, data)
        elif not rows:
            self.note(empty)
        else:
            self._table([column.upper() for column in columns], [[visible(cell) for cell in row] for row in rows])

    def record(self, form: str, fields: Mapping[str, object], data: object) -> None:
        """One thing, a line for each of its facts; those that are None are left out."""
        if form != Form.TABLE:
            self.data(form, data)
        else:
            self._table(None, [[key, visible(value)] for key, value in fields.items() if value is not None])

    def message(self, form: str, text: str) -> None:
        """That something was done."""
        if form != Form.TABLE:
            self.data(form, {"status": "ok", "message": text})
        else:
            self.text(text)

    def data(self, form: str, data: object) -> None:
        """JSON or YAML, in which nothing can disturb a terminal either."""
        if form == Form.YAML:
            import yaml

            # Without allow_unicode everything beyond ASCII is escaped: only where it must be.
            safe = not _BUT_LINES.search(json.dumps(data, ensure_ascii=False, default=str))
            text = yaml.safe_dump(_plain(data), sort_keys=False, allow_unicode=safe)
        else:
            text = json.dumps(data, indent=2, ensure_ascii=False, default=str)
            text = _BUT_LINES.sub(lambda match: f"\\u{ord(match.group()):04x}", text) + "\n"
        self._write(text)

    def line(self, data: object) -> None:
        """JSON in one line."""
        # ASCII only, so nothing in it can disturb a terminal.
        self._write(json.dumps(data, default=str) + "\n")

    def text(self, text: object) -> None:
        """A line of our own."""
        self._write(visible(text) + "\n")

    def foreign(self, text: str) -> None:
        """Lines written by others: exact for programs, harmless on a terminal."""
        if text and not text.endswith("\n"):
            text += "\n"
        self._write(visible(text, lines=True) if sys.stdout.isatty() else text)

    # --- what is not the result ---------------------------------------------------------------------

    def note(self, text: object) -> None:
        """A line for people, on standard error."""
        print(visible(text), file=sys.stderr)

    def warning(self, text: object) -> None:
        """Something to look at; the command goes on."""
        self._marked("warning", "yellow", str(text))

    def hint(self, text: str) -> None:
        """What to do about it."""
        self._marked("hint", "cyan", text)

    def error(self, text: str, hint: str | None = None, facts: Sequence[str] = ()) -> None:
        """Why it did not work, what to do, and what to quote when asking for help."""
        self._marked("error", "bold red", text)
        if hint:
            self.hint(hint)
        if facts:
            self._marked("", "bright_black", visible(", ".join(facts)))

    # --- how ----------------------------------------------------------------------------------------

    def console(self, stream: TextIO) -> Console:
        """A Rich console for a stream."""
        from rich.console import Console

        off = self._color is False or (self._color is None and bool(os.environ.get("NO_COLOR")))
        return Console(file=stream, highlight=False, markup=False, emoji=False, no_color=off or None, soft_wrap=False)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _marked(self, word: str, style: str, text: str) -> None:
        label = f"{word}: " if word else "       "
        if not sys.stderr.isatty():
            print(f"{label if word else '  '}{visible(text)}", file=sys.stderr, flush=True)
            return
        from rich.text import Text

        self.console(sys.stderr).print(Text.assemble((label, style), visible(text)), soft_wrap=True)

    def _table(self, header: list[str] | None, rows: list[list[str]]) -> None:
        if not sys.stdout.isatty():
            self._write(_columns(([header] if header else []) + rows))
            return
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=None, show_header=header is not None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0)
        )
        for number, name in enumerate(header or ["", ""]):
            # The first column is what one copies: an id, a path, a key.
            table.add_column(name, no_wrap=number == 0, overflow="fold", style="" if header or number else "cyan")
        for row in rows:
            table.add_row(*(Text(cell, style=_STATE_STYLES.get(cell, "")) for cell in row))
        self.console(sys.stdout).print(table)


def _columns(rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _plain(data: object) -> Any:
    """Only what YAML's safe dumper knows."""
    return json.loads(json.dumps(data, default=str))
