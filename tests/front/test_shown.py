"""What others wrote is shown, and never obeyed: by a terminal, by rich, by whoever reads a log line by line."""

import io
import json
import logging
import sys
from dataclasses import dataclass

import pytest
from tests.front.test_audit_command import code
from tests.storage.long_runs import LongRun

from weighbridge import logs
from weighbridge.cli.report import print_faults, print_json, print_line, print_table
from weighbridge.flows.artifacts import audit_page
from weighbridge.storage.audit.report import Audit
from weighbridge.storage.records import write_record
from weighbridge.storage.stores import open_store
from weighbridge.visible import visible

EVIL = "a\x1b]0;owned\x07b\x9b2Jc\rd\u202ee\u2028f\x7fg\nforged line\ttab"
OBEYED = [c for c in EVIL if not c.isprintable()]


@dataclass(frozen=True)
class Said:
    what: str


def test_a_terminal_is_shown_escapes_and_obeys_none(capsys: pytest.CaptureFixture[str]) -> None:
    print_line(EVIL)
    print_table(("column",), [(EVIL,)])
    print_faults([ValueError(EVIL)])
    shown = capsys.readouterr()
    assert shown.out.count("\n") == 3 and shown.err.count("\n") == 1
    for text in (shown.out.replace("\n", ""), shown.err.replace("\n", "")):
        assert "\\x1b]0;owned" in text and "\\x9b2J" in text and "\\u202e" in text
        assert not [c for c in text if c in OBEYED]


def test_json_says_what_was_said_and_a_terminal_obeys_none_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(Said(EVIL + "\ud800"))
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"what": EVIL + "\ud800"}
    assert not [c for c in shown[:-1] if c in OBEYED]


def test_a_table_on_a_terminal_takes_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "200")
    print_table(("column",), [("[/no such tag]",), ("[link=http://evil]x[/link]",), (EVIL,)])
    assert "[/no such tag]" in terminal.getvalue() and "[link=http://evil]" in terminal.getvalue()
    assert "]0;owned\x07" not in terminal.getvalue()


def test_a_log_line_is_one_line_whatever_an_event_holds(capsys: pytest.CaptureFixture[str]) -> None:
    text = logs._plain(None, "info", {"event": "host failed", "error": EVIL, "exception": "Traceback\n  line\x1b"})
    assert text.count("\n") == 1 and text.endswith("exception=Traceback\n  line\\x1b")
    assert not [c for c in text if c in OBEYED and c != "\n"]
    assert logging.getLogger("weighbridge")


def test_every_question_about_a_hostile_run_is_answered_without_what_a_terminal_obeys(
    tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_store(str(tmp_path_factory.mktemp("run") / "root"))
    run = LongRun(store, tensors=2, hosts=("a",)).grow(2)
    write_record(store, run.record("a", outcome=EVIL))
    for words in (("status",), ("log",), ("show", 2), ("hosts",), ("audit",), ("stats",)):
        for more in ((), ("--json",)) if words[0] != "stats" else ((),):
            code(*words, "--store", store.url, *more)
            shown = capsys.readouterr()
            assert not [c for c in shown.out + shown.err if c in OBEYED and c not in "\n\t"], words


def test_an_artifact_shows_what_a_store_says_as_text() -> None:
    found = Audit(3)
    found.found("![x](http://evil/pixel)", "[click](javascript:1) <img src=x> `code` **bold**\n# head")
    page = audit_page(found).splitlines()[-1]
    assert "\\!\\[x\\]" in page and "\\<img" in page and "\\`code\\`" in page and "\\*\\*bold" in page


def test_what_is_printable_stays_as_it_is() -> None:
    assert visible("Größe 3 → model.layers.0 ✓ 漢字") == "Größe 3 → model.layers.0 ✓ 漢字"
