"""A real Chromium, headless, driven by the W3C WebDriver protocol through chromedriver."""

import asyncio
import base64
import re
import selectors
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
WAIT_S = 30.0
POLL_S = 0.05
ARGUMENTS = (
    # Root may not use the sandbox; whoever runs the tests in a container often is root.
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    # Nothing of its own goes out.
    *("--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--window-size=1440,1000"),
)


@dataclass(slots=True)
class Browser:
    """A browser session. Calls run in the test's event loop, which also serves the page."""

    session: str
    """URL of the session at chromedriver."""

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return a command's value; AssertionError with chromedriver's message if it fails."""
        # Without `verify` a client costs 1 ms, and else 60: it reads all certificates.
        async with httpx.AsyncClient(timeout=CALL_TIMEOUT_S, verify=False) as client:
            json = body if method == "GET" else body or {}
            response = await client.request(method, f"{self.session}/{path}", json=json)
        assert response.is_success, response.text
        return response.json()["value"]

    async def open(self, url: str) -> None:
        await self.call("POST", "url", {"url": url})

    async def run(self, script: str, *args: Any) -> Any:
        """Run a function with this body in the page, and return its value."""
        return await self.call("POST", "execute/sync", {"script": script, "args": args})

    async def read(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        return await self.run(f"return {script}")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true, and return its value."""
        deadline = time.monotonic() + WAIT_S
        while not (value := await self.read(script)):
            assert time.monotonic() < deadline, f"never true: {script}"
            await asyncio.sleep(POLL_S)
        return value

    async def text(self, selector: str) -> str:
        """Return the visible text of an element."""
        return str(
            await self.run("return document.querySelector(arguments[0]).innerText", selector)
        )

    async def write(self, selector: str, text: str) -> None:
        """Type a text into an element."""
        found = await self.call("POST", "element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        await self.call("POST", f"element/{element}/value", {"text": text})

    async def click(self, selector: str) -> None:
        found = await self.call("POST", "element", {"using": "css selector", "value": selector})
        (element,) = found.values()
        await self.call("POST", f"element/{element}/click")

    async def console(self) -> list[str]:
        """Return the console's entries since the last call."""
        entries = await self.call("POST", "se/log", {"type": "browser"})
        return [f"{each['level']}: {each['message']}" for each in entries]

    async def prefer(self, scheme: str) -> None:
        """Emulate the color scheme `light` or `dark`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        params = {"features": features}
        body = {"cmd": "Emulation.setEmulatedMedia", "params": params}
        await self.call("POST", "goog/cdp/execute", body)

    async def screenshot(self) -> bytes:
        """Return a screenshot of the window as PNG."""
        return base64.b64decode(await self.call("GET", "screenshot"))


class Chromium:
    """chromedriver and one browser, as a context; both have ended when it is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Browser:
        self._driver = subprocess.Popen(
            ["chromedriver", "--port=0"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            assert self._driver.stdout is not None
            address = f"http://127.0.0.1:{_port(self._driver.stdout)}"
            arguments = [*ARGUMENTS, f"--user-data-dir={self._folder}"]
            wanted = {
                "browserName": "chrome",
                "goog:chromeOptions": {"args": arguments},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            body = {"capabilities": {"alwaysMatch": wanted}}
            response = httpx.post(f"{address}/session", json=body, timeout=START_TIMEOUT_S)
            assert response.is_success, response.text
            self._session = f"{address}/session/{response.json()['value']['sessionId']}"
        except BaseException:
            self._stop_driver()
            raise
        return Browser(self._session)

    def __exit__(self, *_: object) -> None:
        try:
            httpx.delete(self._session, timeout=CALL_TIMEOUT_S)
        finally:
            self._stop_driver()

    def _stop_driver(self) -> None:
        self._driver.terminate()
        self._driver.communicate(timeout=CALL_TIMEOUT_S)


def _port(output: IO[str]) -> int:
    """Return the port from chromedriver's output."""
    with selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        deadline, lines = time.monotonic() + START_TIMEOUT_S, []
        while ready.select(max(0.0, deadline - time.monotonic())) and (line := output.readline()):
            lines.append(line)
            if match := re.search(r"started successfully on port (\d+)", line):
                return int(match[1])
    raise AssertionError(f"chromedriver has not started: {''.join(lines)}")
