"""A real browser without a window, driven by its DevTools protocol over two pipes: no port, no further package.

with Browser() as browser:  page = browser.page(width=420);  page.go(url);  page.value("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
ANSWER_S_MAX = 60
WAIT_S_MAX = 30.0


def find_browser() -> str | None:
    """The program, where one is installed."""
    return os.environ.get("KVSTORE_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


in_a_browser = pytest.mark.skipif(
    find_browser() is None, reason="no Chromium is installed (Debian: apt-get install chromium)"
)

# Elements that reach beyond the window, or whose text is cut off although it must be read whole.
OUTSIDE = """[...document.querySelectorAll("body *")].filter((one) => {
  const box = one.getBoundingClientRect();
  return box.width && (box.right > innerWidth + 0.5 || box.left < -0.5);
}).map((one) => `${one.tagName}.${one.className?.baseVal ?? one.className}: ${one.textContent.slice(0, 40)}`)"""
CUT = """[...document.querySelectorAll(".figure, .means, .pill, button, .legend b, td.right, td.short, h2, .unit")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.clientWidth).map((one) => one.textContent)"""


class Browser:
    """A Chromium with a profile of its own. Context manager."""

    def __init__(self) -> None:
        program = find_browser()
        assert program, f"none of {', '.join(NAMES)} is installed"
        self._home = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol wants its pipes as descriptors 3 and 4.
        line = 'exec "$@" 3<&"$IN" 4>&"$OUT"'
        arguments = [
            program, "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--no-sandbox",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update",
            "--disable-default-apps", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb",
            f"--user-data-dir={self._home.name}/profile", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", line, "browser", *arguments],
            pass_fds=(theirs_in, theirs_out),
            env={**os.environ, "IN": str(theirs_in), "OUT": str(theirs_out), "HOME": self._home.name},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read = b""
        self._number = 0
        self.events: deque[dict[str, Any]] = deque()
        self._contexts: list[str] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._home.cleanup()

    def page(self, width: int = 1300, height: int = 1000, dark: bool = False) -> Page:
        """A new tab of this size, on its own: it shares nothing with others."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        self._contexts.append(context)
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, width, height, dark)

    def close_pages(self) -> None:
        """All tabs; what they do goes on otherwise."""
        while self._contexts:
            self.call("Target.disposeBrowserContext", browserContextId=self._contexts.pop())
        self.events.clear()

    def call(self, method: str, session: str = "", **words: Any) -> dict[str, Any]:
        """One command and its answer; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": words}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until_s = time.monotonic() + ANSWER_S_MAX
        while True:
            told = self._next(until_s - time.monotonic())
            assert told is not None, f"no answer to {method} within {ANSWER_S_MAX} s"
            if told.get("id") == number:
                assert "error" not in told, f"{method}: {told['error']}"
                result: dict[str, Any] = told["result"]
                return result
            self.events.append(told)

    def collect(self) -> None:
        """Take in the events that have come."""
        while (told := self._next(0)) is not None:
            self.events.append(told)

    def _next(self, wait_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, wait_s))
            if not ready:
                return None
            piece = os.read(self._in, 1 << 20)
            assert piece, "the browser ended"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        told: dict[str, Any] = json.loads(message)
        return told


class Page:
    """One tab. `requests`: every address it asked for; `complaints`: what its console and its exceptions said."""

    def __init__(self, browser: Browser, session: str, width: int, height: int, dark: bool) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []
        self.complaints: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def call(self, method: str, **words: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **words)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """What an expression is, as JSON has it; a promise is awaited."""
        words = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        told = self.call("Runtime.evaluate", **words)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str, wait_s: float = WAIT_S_MAX) -> Any:
        """Until an expression is true; what it is then."""
        return self.until(lambda: self.value(expression), expression, wait_s)

    def until(self, is_so: Callable[[], Any], what: str, wait_s: float = WAIT_S_MAX) -> Any:
        until_s = time.monotonic() + wait_s
        while not (found := is_so()):
            assert time.monotonic() < until_s, f"not within {wait_s} s: {what}; {self.heard()}"
            time.sleep(0.05)
        return found

    def heard(self) -> list[str]:
        """What its console and its exceptions have said so far."""
        self._browser.collect()
        events = self._browser.events
        for _ in range(len(events)):
            event = events.popleft()
            if event.get("sessionId") == self._session:
                self._hear(event["method"], event["params"])
            else:
                events.append(event)
        return self.complaints

    def _hear(self, method: str, words: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(words["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            details = words["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and words["type"] in ("error", "warning", "assert"):
            self.complaints.append(str([one.get("value") for one in words["args"]]))
        elif method == "Log.entryAdded" and words["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{words['entry']['text']} {words['entry'].get('url', '')}")

    def picture(self, path: Path, whole: bool = True) -> None:
        """A PNG of the whole page, or of what is seen without scrolling."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)
