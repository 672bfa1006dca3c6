"""Drives a headless Chromium over pipes, by the DevTools protocol, for tests of pages."""

import json
import os
import shutil
import subprocess
import tempfile


class Browser:
    """One page of a browser. `problems` lists what its pages wrote to the console, and what they tried to load."""

    def __init__(self, program):
        self._profile = tempfile.mkdtemp()
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def use_pipes():  # the browser reads from descriptor 3 and writes to 4
            copies = os.dup(to_browser), os.dup(from_browser)
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=use_pipes,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received, self._id, self._session = b"", 0, None
        self.problems, self._loaded = [], False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _receive(self):
        while b"\0" not in self._received:
            data = os.read(self._read, 1 << 16)
            if not data:
                raise RuntimeError(f"the browser exited with {self._process.wait()}")
            self._received += data
        message, _, self._received = self._received.partition(b"\0")
        message = json.loads(message)
        event, values = message.get("method"), message.get("params")
        if event == "Page.loadEventFired":
            self._loaded = True
        elif event in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(f"{event}: {json.dumps(values)[:500]}")
        elif event == "Network.requestWillBeSent" and not values["request"]["url"].startswith(("file:", "data:")):
            self.problems.append(f"request for {values['request']['url']}")
        return message

    def call(self, method, **values):
        self._id += 1
        message = {"id": self._id, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def open(self, url):
        self._loaded = False
        error = self.call("Page.navigate", url=url).get("errorText")
        if error:
            raise RuntimeError(f"{url}: {error}")
        while not self._loaded:
            self._receive()

    def evaluate(self, script):
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def set_screen(self, width, height, scheme):
        """`scheme` is "light" or "dark"."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
