"""How results are shown: JSON on request, tables on a terminal, plain lines elsewhere. The one place that prints."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

_UNITS = ("B", "kB", "MB", "GB", "TB")


def plain(value: object) -> Any:
    """A frozen value as what JSON knows; bytes as hex."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def print_json(value: object) -> None:
    """One object on one line."""
    sys.stdout.write(json.dumps(plain(value), ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_line(text: str) -> None:
    """One line of text."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A table on a terminal; elsewhere a header and tab-separated lines."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(str(cell) for cell in row) + "\n")
        sys.stdout.flush()
        return
    table = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def size(nbytes: float) -> str:
    """Bytes for people: 1.2 MB (powers of 1000)."""
    for unit in _UNITS[:-1]:
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} {_UNITS[-1]}"


def share(part: float) -> str:
    """A share for people: 1.48 %."""
    return f"{100 * part:.2f} %"
