"""How results are shown: JSON on request, tables on a terminal, plain lines elsewhere. The one place that prints."""

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weighbridge.errors import UsageError
from weighbridge.visible import visible, visible_json

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
    sys.stdout.write(visible_json(json.dumps(plain(value), ensure_ascii=False)) + "\n")
    sys.stdout.flush()


def write_arrow(path: Path, kind: type, values: Iterable[object]) -> None:
    """Values of one dataclass as an Arrow IPC file, a column a field; what is no number or text becomes JSON."""
    import pyarrow as pa

    if path.exists() and not path.is_file():
        raise UsageError(f"{path} is no file, so nothing was written.")
    hints = get_type_hints(kind)
    known = {int: pa.int64(), float: pa.float64(), bool: pa.bool_(), str: pa.string()}
    fields = [(field.name, known.get(hints[field.name])) for field in dataclasses.fields(kind)]
    rows = [plain(value) for value in values]
    columns = [
        pa.array(
            [row[name] if type_ else json.dumps(row[name], ensure_ascii=False) for row in rows], type_ or pa.string()
        )
        for name, type_ in fields
    ]
    table = pa.table(columns, names=[name for name, _ in fields])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def given_away(kind: type, values: Iterable[object], *, json: bool, arrow: Path | None) -> bool:
    """Writes values to a file, or prints them as JSON, an object a line, if either was asked for."""
    if not json and arrow is None:
        return False
    found = list(values)
    if arrow is not None:
        write_arrow(arrow, kind, found)
    if json:
        for value in found:
            print_json(value)
    return True


def print_faults(faults: Iterable[Exception]) -> None:
    """What could not be read, on standard error, after the answer that it is missing from."""
    for fault in faults:
        sys.stderr.write(f"weighbridge: left out: {visible(str(fault))}\n")


def print_line(text: str) -> None:
    """One line of text."""
    sys.stdout.write(visible(text) + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "") -> None:
    """A table on a terminal; elsewhere a header and tab-separated lines."""
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            sys.stdout.write("\t".join(visible(str(cell)) for cell in row) + "\n")
        sys.stdout.flush()
        return
    table = Table(*columns, title=title or None, title_justify="left")
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))  # no markup: a label is nobody's orders
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
