"""A page in headless Chromium, spoken to over its debugging pipe: JSON messages, each ended by a zero byte."""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXECUTABLE = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"),
    # These keep it from looking for hosts that a closed network does not have.
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"),
)
# It expects its ends of the pipes as file descriptors 3 and 4; by way of 98 and 99, not to close one with the other.
START = 'exec 98<&"$0" 99>&"$1" 3<&98 4>&99; shift; exec "$@"'


class Page:
    """One tab."""

    def __init__(self, to_browser: Any, from_browser: Any):
        self._to, self._from = to_browser, from_browser
        self._sent = 0
        self._session: str | None = None
        self.messages: list[str] = []
        """What the console said: errors, warnings, refused requests."""
        self.requests: list[str] = []
        """Addresses the page asked for."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command, and returns its result once that has come."""
        self._sent += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._sent, "method": method, "params": params, **session}
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while (answer := self._receive()).get("id") != self._sent:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Loads a file and waits until it is there."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def _receive(self) -> dict[str, Any]:
        raw = bytearray()
        while not raw.endswith(b"\0"):
            byte = self._from.read(1)
            if not byte:
                raise RuntimeError("expected an answer, but Chromium has ended")
            raw += byte
        message: dict[str, Any] = json.loads(raw[:-1])
        params = message.get("params", {})
        if message.get("method") == "Log.entryAdded":
            self.messages.append(params["entry"]["text"])
        elif message.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            self.messages.append(str(params))
        elif message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        return message


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """A fresh Chromium that ends with the block. Without one the test is skipped, or fails where one is required."""
    if EXECUTABLE is None:
        if os.environ.get("REQUIRE_CHROMIUM") == "1":
            pytest.fail("no Chromium is installed")
        pytest.skip("no Chromium is installed")
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                *("bash", "-c", START, str(read_commands), str(write_answers)),
                *(EXECUTABLE, *ARGUMENTS, f"--user-data-dir={profile}"),
            ],
            pass_fds=(read_commands, write_answers),
            stderr=subprocess.DEVNULL,
        )
        os.close(read_commands)
        os.close(write_answers)
        with os.fdopen(write_commands, "wb") as to_browser, os.fdopen(read_answers, "rb") as from_browser:
            try:
                yield Page(to_browser, from_browser)
            finally:
                process.kill()
                process.wait()
