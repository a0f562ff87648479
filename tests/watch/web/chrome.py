"""A real headless Chromium, driven over its debugging pipe: open, click, read, photograph.

Holds the few calls of the DevTools protocol that the page's tests need, with nothing to install.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """The browser's path, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Page:
    """One tab. Methods wait at most `within_s` seconds and raise TimeoutError beyond."""

    def __init__(self, to_browser: int, from_browser: int, within_s: float = 20.0) -> None:
        self._to, self._from, self._within_s = to_browser, from_browser, within_s
        self._num = 0
        self._rest = b""
        self._select = selectors.DefaultSelector()
        self._select.register(from_browser, selectors.EVENT_READ)
        self.events: list[dict[str, Any]] = []
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num += 1
        message: dict[str, Any] = {"id": self._num, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + self._within_s
        while True:
            answer = self._read(until)
            if answer.get("id") == self._num:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self.events.append(answer)

    def _read(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not self._select.select(left):
                raise TimeoutError("the browser does not answer")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("the browser is gone")
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression (a promise's, when it has come)."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def wait(self, script: str) -> Any:
        """Until the expression is true; its value."""
        until = time.monotonic() + self._within_s
        while True:
            # While a page is being replaced there is nothing to ask.
            with contextlib.suppress(RuntimeError):
                value = self.evaluate(script)
                if value:
                    return value
            if time.monotonic() > until:
                raise TimeoutError(f"never true: {script}")
            time.sleep(0.03)

    def text(self, selector: str) -> str:
        return str(self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, selector: str) -> None:
        """With the mouse, where the element is."""
        box = self.evaluate(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect();"
            "return [b.left + b.width / 2, b.top + b.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call(
                "Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left",
                clickCount=1,
            )  # fmt: skip

    def point(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code,
                **({"text": "\r"} if key == "Enter" and kind == "keyDown" else {}),
            )  # fmt: skip

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def look(
        self, width: int, *, dark: bool = False, height: int = 900, still: bool = False
    ) -> None:
        """A window of that width, in the dark or light scheme, with or without motion."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if still else "no-preference"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def photograph(self, path: Path, *, top: int = 0, height: int | None = None) -> None:
        """The window, or a strip of the whole page from `top` on, as a PNG."""
        clip: dict[str, Any] = {}
        if height is not None:
            width = self.evaluate("innerWidth")
            clip["clip"] = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **clip)
        path.write_bytes(base64.b64decode(data["data"]))

    def complaints(self) -> list[str]:
        """Exceptions, refused resources and console errors so far."""
        self.evaluate("1")
        out = []
        for event in self.events:
            said = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    out.append(json.dumps(said["exceptionDetails"])[:500])
                case "Log.entryAdded" if said["entry"]["level"] == "error":
                    out.append(said["entry"]["text"] + " " + said["entry"].get("url", ""))
                case "Runtime.consoleAPICalled" if said["type"] == "error":
                    out.append(json.dumps(said["args"])[:500])
        return out

    def asked(self) -> list[str]:
        """Every address that was asked for."""
        self.evaluate("1")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextlib.contextmanager
def browser(within_s: float = 20.0) -> Iterator[Page]:
    """A fresh Chromium with one tab, gone with its files afterwards."""
    binary = find()
    assert binary is not None
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        # The browser reads its file descriptor 3 and writes 4.
        line = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        process = subprocess.Popen(
            ["bash", "-c", line, binary, *FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Page(ours_out, ours_in, within_s)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
