"""A headless Chromium that a test drives through the DevTools protocol over pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .service_rig import wait_until

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
_EXEC = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4);"
_EXEC += "os.execv(sys.argv[3], sys.argv[3:])"
"""Chromium reads commands from descriptor 3, and writes to 4."""

KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Browser:
    """One page of a browser, which keeps what happens in it.

    Attributes:
        problems: messages of the console, exceptions and violations of the page's policy.
        requests: URLs that the page has requested.
    """

    def __init__(self, folder: Path, width: int = 1100, height: int = 800) -> None:
        """Start with an empty page; `folder` is for the profile."""
        assert CHROMIUM is not None
        commands, self._commands = os.pipe()
        self._events, events = os.pipe()
        command = [sys.executable, "-c", _EXEC, str(commands), str(events), CHROMIUM, *_FLAGS]
        command += ["--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
        self._process = subprocess.Popen(
            command, pass_fds=(commands, events), stderr=subprocess.DEVNULL
        )
        os.close(commands)
        os.close(events)
        self._rest = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets: list[dict[str, Any]] = []
        wait_until(lambda: targets.extend(self._pages()) or targets)
        target = {"targetId": targets[0]["targetId"], "flatten": True}
        self._session = self.call("Target.attachToTarget", **target)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def _pages(self) -> list[dict[str, Any]]:
        targets = self.call("Target.getTargets")["targetInfos"]
        return [target for target in targets if target["type"] == "page"]

    def call(self, method: str, **params: Any) -> Any:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._message()).get("id") != number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._events, 1 << 16)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        decoded: dict[str, Any] = json.loads(message)
        return decoded

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.problems.append(json.dumps(params)[:2000])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        options = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        result = self.call("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until a JavaScript expression is true, and raises nothing."""
        tried = f"(() => {{ try {{ return Boolean({condition}); }} catch {{ return false; }} }})()"
        wait_until(lambda: self.evaluate(tried), seconds)

    def text(self, selector: str) -> str:
        """Return the text of the last element that matches, as it is shown."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)"
        text: str = self.evaluate(f"{found}?.innerText ?? ''")
        return text

    def click(self, selector: str) -> None:
        """Click the last element that matches."""
        self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1).click()")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        event["modifiers"] = 8 if shift else 0
        if key == "Enter":
            event["text"] = "\r"
        self.call("Input.dispatchKeyEvent", type="keyDown", **event)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme, `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        self._session = None
        self.call("Browser.close")
        self._process.wait(60)
        os.close(self._commands)
        os.close(self._events)
