"""Text that others wrote, as it may be shown: names, labels and errors come from stores, engines and other machines,
and a terminal obeys what it is shown. Must not know who shows it."""

import re

_OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What moves a cursor, begins a command of a terminal, or turns the direction in which text is read."""


def visible(text: str, *, lines: bool = False) -> str:
    """`text` with every character that a terminal would obey written as an escape; with `lines`, line breaks stay."""
    return _OBEYED.sub(lambda found: "\n" if lines and found[0] == "\n" else _escaped(found[0]), text)


def visible_json(text: str) -> str:
    """A JSON document with the same characters as JSON's own escapes: it says what it said."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(character: str) -> str:
    return repr(character)[1:-1]
