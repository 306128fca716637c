"""A headless Chromium, driven by the DevTools protocol over aiohttp's WebSocket.

Protocol: https://chromedevtools.github.io/devtools-protocol (Page, Runtime, Emulation, Input).
"""

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.view.page import view_dump, write_page


def chromium() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def written_page(folder: Path, samples: list[Any], texts: TokenTexts) -> str:
    """Write a page of samples to a file, and return its URL."""
    write_dump(folder / "run.jsonl.gz", samples, texts)
    out = folder / "run.html"
    out.write_text(write_page(view_dump(folder / "run.jsonl.gz", None), "run"), encoding="utf-8")
    return f"file://{out}"


class Page:
    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.console: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive(timeout=300)).data)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message.get("result", {}))
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.console.append(json.dumps(params)[:600])

    async def run(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        found = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str) -> Any:
        """Evaluate an expression until it is true, and return its value."""
        for _ in range(1500):
            value = await self.run(script)
            if value or value == {}:  # an element is returned as {}
                return value
            await asyncio.sleep(0.02)
        raise AssertionError(f"never true: {script}; console: {self.console}")

    async def key(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def screen(self, width: int, height: int, *, dark: bool = False) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def go(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    """Open a tab of a new browser with an empty profile."""
    program = chromium()
    assert program is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
        process = await asyncio.create_subprocess_exec(
            *(program, *options, "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    tabs = [tab for tab in await answer.json() if tab["type"] == "page"]
                async with http.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            process.terminate()
            await process.wait()


async def _port(path: Path) -> int:
    for _ in range(600):
        if lines := _text(path).split():
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start")


def _text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""
