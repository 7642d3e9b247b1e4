"""A browser without a screen (Chromium by its driver, from Debian), by the WebDriver protocol."""

import base64
import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from .ports import free_port
from .process import Failure, Skip, wait_until

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c"}


class Browser:
    """A context: a browser with a theme (`light` or `dark`) and a window of some size."""

    def __init__(self, logs: Path, theme="light", size=(1280, 1000)):
        driver = shutil.which("chromedriver")
        chromium = shutil.which("chromium")
        if not driver or not chromium:
            raise Skip("chromium is missing (Debian: chromium, chromium-driver)")
        self.home = tempfile.mkdtemp(prefix="unbroken-browser-")
        self.port = free_port()
        self.log = open(logs / f"chromedriver-{theme}.log", "wb")
        self.driver = subprocess.Popen(
            [driver, f"--port={self.port}"], stdout=self.log, stderr=subprocess.STDOUT
        )
        self.session = None
        wait_until(self._is_ready, 30, "the driver of the browser answers")
        args = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--force-device-scale-factor=1",
            f"--window-size={size[0]},{size[1]}",
            f"--user-data-dir={self.home}",
            *(["--force-dark-mode"] if theme == "dark" else []),
        ]
        options = {"args": args, "binary": chromium}
        always = {"browserName": "chrome", "goog:chromeOptions": options}
        always["goog:loggingPrefs"] = {"browser": "ALL"}
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
        self.session = answer["sessionId"]
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self._do(
            "POST",
            "/goog/cdp/execute",
            {"cmd": "Emulation.setEmulatedMedia", "params": {"features": features}},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        try:
            self._do("DELETE", "", None)
        finally:
            self.driver.terminate()
            self.driver.wait(20)
            self.log.close()
            shutil.rmtree(self.home, ignore_errors=True)

    def _is_ready(self) -> bool:
        try:
            return self._ask("GET", "/status")["ready"]
        except (OSError, Failure):
            return False

    def _ask(self, method: str, path: str, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=data,
            method=method,
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())["value"]
        except urllib.error.HTTPError as e:
            raise Failure(f"browser: {path}: {e.read().decode()[:400]}") from e

    def _do(self, method: str, path: str, body=None):
        return self._ask(method, f"/session/{self.session}{path}", body)

    def open(self, url: str):
        """Opens a page."""
        self._do("POST", "/url", {"url": url})

    def run(self, script: str, *args):
        """What a script in the page gives."""
        return self._do("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """The text of an element; empty where there is none."""
        return self.run(
            "const e = document.querySelector(arguments[0]); return e ? e.textContent : ''",
            selector,
        )

    def click(self, selector: str):
        """Clicks on an element, as a person does: what covers it gets the click."""
        found = self._do("POST", "/element", {"using": "css selector", "value": selector})
        self._do("POST", f"/element/{found[ELEMENT]}/click", {})

    def press(self, key: str):
        """Presses a key where the focus is."""
        value = KEYS.get(key, key)
        actions = [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        keyboard = {"type": "key", "id": "keyboard", "actions": actions}
        self._do("POST", "/actions", {"actions": [keyboard]})

    def picture(self, path: Path):
        """Keeps what is to be seen of the page, from top to bottom."""
        shown = {"captureBeyondViewport": True, "format": "png"}
        cdp = {"cmd": "Page.captureScreenshot", "params": shown}
        path.write_bytes(base64.b64decode(self._do("POST", "/goog/cdp/execute", cdp)["data"]))

    def complaints(self) -> list:
        """What the browser found wrong with the page since this was last asked."""
        lines = self._do("POST", "/se/log", {"type": "browser"})
        return [line["message"] for line in lines if line["level"] in ("SEVERE", "WARNING")]

    def wait_for(self, script: str, seconds: float, what: str):
        """Waits until a script gives something true."""
        return wait_until(lambda: self.run(script), seconds, what, longest_pause_s=0.1)
