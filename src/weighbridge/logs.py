"""How events are written: structlog through the standard library's loggers, so that Prefect can attach them to the run
that they belong to; plain lines for people, JSON lines on request. Leaves a program's own structlog set-up alone."""

import logging
import sys
from typing import Any

import structlog

from weighbridge.visible import visible

_SHARED: list[Any] = [
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
]


def _plain(_logger: object, _method: str, event: Any) -> str:
    """`event key=value ...`: one line a person reads and grep finds; level and time are the handler's."""
    event = dict(event)
    for name in ("level", "timestamp"):
        event.pop(name, None)
    words = [str(event.pop("event"))]
    traced = event.pop("exception", None)
    words += [f"{key}={value}" for key, value in event.items() if key not in ("exc_info", "stack")]
    line = visible(" ".join(words))
    return line if traced is None else f"{line} exception={visible(str(traced), lines=True)}"


def configure(*, json_lines: bool = False) -> None:
    """Sets structlog up for this process, unless the program did so already."""
    if not structlog.is_configured():
        _set_up(json_lines=json_lines)


def _set_up(*, json_lines: bool) -> None:
    renderer: Any = structlog.processors.JSONRenderer() if json_lines else _plain
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *_SHARED, structlog.processors.format_exc_info, renderer],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def to_stderr(*, json_lines: bool = False, level: int = logging.INFO) -> None:
    """Also writes the events of the `weighbridge` loggers to standard error: for commands, not for a library. A
    command's standard output is its answer, so whatever set structlog up before it in this process has no say."""
    _set_up(json_lines=json_lines)
    logger = logging.getLogger("weighbridge")
    logger.setLevel(level)
    if any(getattr(h, "of_weighbridge", False) for h in logger.handlers):
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s" if json_lines else "%(asctime)s %(levelname).1s %(message)s"))
    handler.of_weighbridge = True  # type: ignore[attr-defined]
    logger.addHandler(handler)
    logger.propagate = False  # to the root's handlers, of which Prefect brings one that would print each event again
