"""Debian's Chromium without a screen, driven over its DevTools protocol: what a person does in the UI, tests do here.
Clicks are a mouse's, at the middle of what is seen. Every wait is for a condition, and has a deadline."""

import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from websockets.sync.client import ClientConnection, connect

STEP_SECONDS = 90.0
WIDTH, HEIGHT = 1280, 800
_AGAIN_SECONDS = 10.0
_LOOK_SECONDS = 0.1
_STILL = 8

# The middle of what says a text, [] while it is not there or something lies over it. Of elements that hold each other,
# all of which say it, the innermost; of several such, the last, which is the one in front.
_MIDDLE = """((wanted) => {
  const says = (e) => e.textContent.replace(/\\s+/g, ' ').trim() === wanted;
  const all = [...document.querySelectorAll('*')].filter((e) => says(e) && e.getClientRects().length);
  const one = all.filter((e) => ![...e.children].some(says)).pop();
  if (!one) return [];
  one.scrollIntoView({block: 'center'});
  const box = one.getBoundingClientRect();
  const middle = [box.x + box.width / 2, box.y + box.height / 2];
  const hit = document.elementFromPoint(...middle);
  const button = one.closest('button');
  return hit && (one.contains(hit) || hit.contains(one)) && !(button && button.disabled) ? middle : [];
})"""


class ChromiumMissing(Exception):
    """There is no Chromium on this machine, which these tests are about: `apt-get install chromium`."""


class TooLate(AssertionError):
    """The page did not come to show what was waited for."""


class Browser:
    """One page of a headless Chromium; a context manager. Nothing it does leaves loopback, or its own folder."""

    def __init__(self) -> None:
        program = shutil.which("chromium")
        if program is None:
            raise ChromiumMissing("chromium is not on this machine: apt-get install --no-install-recommends chromium")
        self._folder = Path(tempfile.mkdtemp(prefix="weighbridge-browser-"))
        self._log = self._folder / "log"
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--no-default-browser-check", "--disable-background-networking"]
        command += ["--disable-component-update", "--no-proxy-server", "--hide-scrollbars"]
        command += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        command += ["--remote-debugging-address=127.0.0.1", "--remote-debugging-port=0"]
        command += [f"--user-data-dir={self._folder}", f"--window-size={WIDTH},{HEIGHT}", "about:blank"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._numbers = itertools.count(1)
        self._page: ClientConnection | None = None
        self._loaded = 0.0
        try:
            self._page = connect(self._address(), open_timeout=STEP_SECONDS, max_size=None, proxy=None)
            self._ask("Page.enable")
            size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
            self._ask("Emulation.setDeviceMetricsOverride", **size)
        except BaseException:
            self.close()
            raise

    def open(self, url: str) -> None:
        """Goes to an address."""
        self._loaded = time.monotonic()
        self._ask("Page.navigate", url=url)

    def load(self) -> None:
        """Loads the page anew."""
        self.open(str(self.evaluate("location.href")))

    def says(self, text: str) -> bool:
        """Whether the page shows a text somewhere, now."""
        return text in self.text()

    def text(self) -> str:
        """All that the page shows."""
        return str(self.evaluate("document.body ? document.body.innerText : ''"))

    def wait_says(self, *texts: str, loading: bool = False) -> None:
        """Waits until the page shows all of the texts; if told, it is loaded anew for as long as it does not."""

        def they_are_there() -> bool:
            if loading and time.monotonic() > self._loaded + _AGAIN_SECONDS:
                self.load()
            return all(map(self.says, texts))

        self._until(they_are_there, f"the page shows {texts}")

    def wait_fetched(self, what: str) -> None:
        """Waits until the page, since it was loaded, has fetched something of this name from its server."""
        names = "performance.getEntriesByType('resource').map((one) => one.name).join()"
        self._until(lambda: what in self.evaluate(names), f"the page fetches {what}")

    def click(self, text: str, *, shows: str) -> None:
        """Presses what says exactly `text`, until the page shows `shows`, which it did not before; a page that is still
        arranging itself may slip from under the pointer."""
        deadline = time.monotonic() + STEP_SECONDS
        while not self.says(shows):
            self._until(lambda: self._press(text), f"something says {text!r}", deadline - time.monotonic())
            with suppress(TooLate):
                self._until(lambda: self.says(shows), shows, _AGAIN_SECONDS)
            if time.monotonic() > deadline:
                raise TooLate(f"{text!r} was pressed, and the page does not show {shows!r}:\n{self.text()[-3000:]}")

    def _press(self, text: str) -> bool:
        find = f"{_MIDDLE}({json.dumps(text)})"
        where = self.evaluate(find)
        time.sleep(_LOOK_SECONDS)
        if not where or self.evaluate(find) != where:
            return False  # not there, or not at rest
        at = {"x": where[0], "y": where[1]}
        self._ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
        self._ask("Input.dispatchMouseEvent", type="mousePressed", button="left", clickCount=1, **at)
        self._ask("Input.dispatchMouseEvent", type="mouseReleased", button="left", clickCount=1, **at)
        return True

    def evaluate(self, script: str) -> Any:
        """What a script comes to in the page; must be JSON."""
        told = self._ask("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in told:
            raise AssertionError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def picture(self, path: Path) -> None:
        """Writes what is seen as a PNG, once it is at rest."""
        seen: list[bytes] = []

        def at_rest() -> bool:
            seen.append(base64.b64decode(self._ask("Page.captureScreenshot", format="png")["data"]))
            return len(seen) >= _STILL and len(set(seen[-_STILL:])) == 1

        self._until(at_rest, "the page is at rest")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(seen[-1])

    def close(self) -> None:
        """Ends the browser, and removes its folder."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _address(self) -> str:
        """Where the page's own DevTools listen: Chromium notes its port in its folder."""
        noted = self._folder / "DevToolsActivePort"
        self._until(lambda: self._is_alive() and noted.exists() and noted.read_text().count("\n"), "Chromium starts")
        port = noted.read_text().split()[0]
        pages = httpx.get(f"http://127.0.0.1:{port}/json/list", trust_env=False, timeout=STEP_SECONDS).json()
        return next(str(page["webSocketDebuggerUrl"]) for page in pages if page["type"] == "page")

    def _is_alive(self) -> bool:
        assert self._process.poll() is None, f"Chromium ended: {self._log.read_text()[-2000:]}"
        return True

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        assert self._page is not None
        number = next(self._numbers)
        self._page.send(json.dumps({"id": number, "method": method, "params": parameters}))
        deadline = time.monotonic() + STEP_SECONDS
        while True:
            told = json.loads(self._page.recv(timeout=max(0.0, deadline - time.monotonic())))
            if told.get("id") == number:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result

    def _until(self, true: Callable[[], object], what: str, seconds: float = STEP_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not true():
            if time.monotonic() > deadline:
                shown = self.text()[-3000:] if self._page is not None else "nothing"
                raise TooLate(f"not within {seconds:g} s: {what}. The page shows:\n{shown}")
            time.sleep(_LOOK_SECONDS)
