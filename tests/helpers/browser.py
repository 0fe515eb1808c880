"""A headless Chromium, spoken to over its debugging pipe: JSON messages that end with a zero byte."""

import base64
import fcntl
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # of root's own, in a container
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
KEYS = {"ArrowDown": 40, "ArrowUp": 38, "Tab": 9, "Enter": 13, " ": 32}


class Browser:
    """One tab of a browser that runs."""

    def __init__(self, requests: int, answers: int):
        self.requests = requests
        self.answers = answers
        self.unread = b""
        self.number = 0
        self.session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the DevTools protocol, and return its result. Events meanwhile are kept."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.requests, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self.unread:
            part = os.read(self.answers, 2**16)
            assert part, "the browser has ended"
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def wait_for(self, event: str) -> dict[str, Any]:
        """Wait for the next event of this name."""
        while True:
            for i, message in enumerate(self.events):
                if message.get("method") == event:
                    return self.events.pop(i)["params"]
            self.events.append(self._read())

    def open(self, url: str) -> None:
        """Open an address, and wait until it is shown: at once, where only what is behind # differs."""
        self.events = [message for message in self.events if message.get("method") != "Page.loadEventFired"]
        if "loaderId" in self.call("Page.navigate", url=url):
            self.wait_for("Page.loadEventFired")
        self.settle()

    def run(self, script: str) -> Any:
        """Run JavaScript in the page, and return its value, or that of its promise."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def settle(self) -> None:
        """Let the page do what it has been asked: the change of an address is announced later."""
        self.run("new Promise((done) => setTimeout(() => setTimeout(done)))")

    def permit(self, name: str) -> None:
        """Grant a permission, e.g. clipboard-read, to all pages of the browser."""
        tab, self.session = self.session, None
        self.call("Browser.setPermission", permission={"name": name}, setting="granted")
        self.session = tab

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        code = KEYS[key]
        text = {"text": key} if key == " " else {}
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.settle()

    def click(self, selector: str) -> None:
        """Click an element, as a mouse does."""
        place = """(() => {
            const element = document.querySelector(SELECTOR);
            element.scrollIntoView({block: "center"});
            const around = element.getBoundingClientRect();
            return [around.x + around.width / 2, around.y + around.height / 2];
        })()""".replace("SELECTOR", json.dumps(selector))
        x, y = self.run(place)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)
        self.settle()

    def choose(self, selector: str, value: str) -> None:
        """Choose an option or type a value, and say so, as a user's choice does."""
        self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.value = {json.dumps(value)};"
            " e.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        self.settle()

    def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        return self.run(f"document.querySelector({json.dumps(selector)}).innerText")

    def show_as(self, width: int, scheme: str = "light") -> None:
        """Be a window so wide, in the colours of a scheme: light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def faults(self) -> list[str]:
        """What the console has of errors and warnings, and what was asked of a network."""
        found = []
        for message in self.events:
            method = message.get("method")
            details = message.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(details["exceptionDetails"].get("exception", details["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning"):
                found.append(details["args"])
            elif method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
                found.append(details["entry"]["text"])
            elif method == "Network.requestWillBeSent" and not details["request"]["url"].startswith(("file:", "data:")):
                found.append(details["request"]["url"])
        return list(map(str, found))


def program() -> str:
    """The browser of this machine; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on this machine")
    return found


@contextmanager
def started(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in the folder; it ends with the block."""
    chromium = program()
    ends = []  # numbers from 10 on, so that none is in the way of 3 and 4, at which the browser reads and writes
    for pipe in (os.pipe(), os.pipe()):
        for end in pipe:
            ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10))
            os.close(end)
    to_browser, requests, answers, from_browser = ends
    pid = os.posix_spawn(
        chromium,
        [chromium, *OPTIONS, f"--user-data-dir={folder}", "about:blank"],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, to_browser, 3),
            (os.POSIX_SPAWN_DUP2, from_browser, 4),
            (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
            (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
        ],
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(requests, answers)
    finally:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        os.close(requests)
        os.close(answers)
