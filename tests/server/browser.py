"""Headless Chromium, driven by its DevTools protocol over a pipe: one page, nothing to install beside the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.patience import LIMIT_S

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. What it says on its console, what it throws and what its security policy blocks is kept in `complaints`."""

    def __init__(self, executable: str, profile: Path) -> None:
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        command = [executable, "--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "--disable-gpu"]
        command += ["--hide-scrollbars", "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (to_child, from_child)]  # 3 and 4 may be among the pipes

        def take_places() -> None:
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        with (profile.parent / "browser.log").open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(3, 4), preexec_fn=take_places)
        for fd in (to_child, from_child, *high):
            os.close(fd)
        self._buffer = b""
        self._last_id = 0
        self._loads = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The result of a command; raises RuntimeError where the browser refuses it."""
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + LIMIT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 16) if ready else b""
            if not data:
                raise RuntimeError("the browser does not answer")
            self._buffer += data
        frame, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(frame)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loads += 1
            case "Runtime.exceptionThrown":
                self.complaints.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        done = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str, seconds: float = LIMIT_S) -> None:
        """Until an expression in the page is true."""
        deadline = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < deadline, f"never so: {condition}; {self.complaints}; {self.run('document.body.innerText')}"
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Load a page whole; one that differs from the present one in its fragment only is not loaded."""
        loads, deadline = self._loads, time.monotonic() + LIMIT_S
        self.send("Page.navigate", url=url)
        while self._loads == loads:
            assert time.monotonic() < deadline, f"{url} is not loaded"
            self._note(self._receive())

    def look(self, *, width: int, height: int, dark: bool = False, still: bool = False) -> None:
        """The size of the window, and what the user prefers."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [("prefers-color-scheme", "dark" if dark else "light"), ("prefers-reduced-motion", "reduce" if still else "no-preference")]
        self.send("Emulation.setEmulatedMedia", features=[{"name": name, "value": value} for name, value in features])

    def press(self, key: str, *, shift: bool = False) -> None:
        """A key as the keyboard sends it: Enter, Escape, Tab."""
        code = {"Enter": 13, "Escape": 27, "Tab": 9}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **common, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
