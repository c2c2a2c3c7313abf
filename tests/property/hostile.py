"""What an enemy would send: documents with anything anywhere, files with bytes changed, and limits on what reading may
cost. FUZZ_EXAMPLES says how many cases each test tries; `make fuzz` sets it high."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

many = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)

NAMES = (
    "../../../../tmp/evil.safetensors", "/etc/passwd", "a/../b.safetensors", "..", ".", "", "C:\\x.safetensors",
    "model.safetensors\0", "x" * 400 + ".safetensors", "__metadata__", "embed.weight", "\uff41.safetensors",
)  # fmt: skip
NUMBERS = (-1, 0, 1, 7, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)

scalars = (
    st.none()
    | st.booleans()
    | st.sampled_from(NUMBERS)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(NAMES)
    | st.text(max_size=8)
)
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)


def places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a document."""
    yield at
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from places(value, (*at, key))


@st.composite
def twisted(draw: st.DrawFn, document: Any) -> Any:
    """A document with one to three of its values replaced by anything, removed, or repeated under another name."""
    made = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(places(made))))
        if not path:
            continue
        holder = made
        for key in path[:-1]:
            holder = holder[key]
        deed = draw(st.sampled_from(("replace", "replace", "remove", "repeat")))
        if deed == "replace":
            holder[path[-1]] = draw(anything)
        elif deed == "remove":
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(holder[path[-1]])
        else:
            holder[draw(st.sampled_from(NAMES))] = holder[path[-1]]
    return made


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some changed, cut out, put in or moved."""
    made = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(made) - 1)))
        deed = draw(st.sampled_from(("set", "word", "cut", "insert", "end")))
        if deed == "set" and made:
            made[at] = draw(st.integers(0, 255))
        elif deed == "word":
            value = draw(st.sampled_from(NUMBERS)) % 2**64
            made[at : at + 8] = value.to_bytes(8, "little")[: max(0, len(made) - at)]
        elif deed == "cut":
            del made[at : at + draw(st.integers(1, 64))]
        elif deed == "insert":
            made[at:at] = draw(st.binary(max_size=32))
        else:
            del made[at:]
    return bytes(made)


@contextmanager
def bounded(*, more_bytes: int = 512 << 20, seconds: float = 60.0) -> Iterator[None]:
    """Reading may take so much more address space than the process has, and so long; what asks for more fails here."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + more_bytes, before[1]))
    started = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - started < seconds


def refused(action: Callable[[], object], *errors: type[Exception]) -> bool:
    """Whether an action ended in one of the errors; anything else that it raises goes on."""
    try:
        action()
    except errors:
        return True
    return False
