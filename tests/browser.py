"""A headless Chromium for tests of pages, and what it noticed: errors, requests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def missing() -> str | None:
    """Why there is no browser here; None if there is one."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"no {program} here: apt-get install chromium chromium-driver"
    try:
        import selenium  # noqa: F401
    except ModuleNotFoundError:
        return "selenium is not installed: pip install 'dbo-fx[dev]'"
    return None


class Browser:
    """One window."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, timeout_s: float = 120.0) -> None:
        """Load a page and wait until it says that everything is drawn."""
        from selenium.webdriver.support.ui import WebDriverWait

        self.logs()
        self.driver.get(path.as_uri())
        WebDriverWait(self.driver, timeout_s).until(
            lambda driver: driver.execute_script("return document.body.dataset.readyMs")
        )

    def shows(self, path: Path) -> bool:
        """Whether this page is open."""
        return bool(self.driver.current_url == path.as_uri())

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript; `plot` is the plot's element."""
        prefix = "const plot = document.getElementById('plot');"
        return self.driver.execute_script(prefix + script, *args)

    def until(self, script: str, *args: Any, timeout_s: float = 60.0) -> Any:
        """Run JavaScript until it returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, timeout_s).until(lambda _: self.run(script, *args))

    def point(self, x: float, y: float) -> tuple[int, int]:
        """Where on the screen a point of the upper subplot is."""
        left, top = self.run(
            "const {xaxis, yaxis} = plot._fullLayout, box = plot.getBoundingClientRect();"
            "return [box.left + xaxis._offset + xaxis.l2p(arguments[0]),"
            " box.top + yaxis._offset + yaxis.l2p(arguments[1])]",
            x,
            y,
        )
        return int(left), int(top)

    def move_to(self, x: float, y: float) -> None:
        """Move the mouse to a point of the upper subplot."""
        self._mouse().move_to_location(*self.point(x, y))
        self._perform()

    def click(self, x: float, y: float) -> None:
        """Click on a point of the upper subplot."""
        self._mouse().move_to_location(*self.point(x, y)).click()
        self._perform()

    def scroll(self, x: float, y: float, delta: int) -> None:
        """Turn the wheel over a point of the upper subplot."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

        origin = ScrollOrigin.from_viewport(*self.point(x, y))
        ActionChains(self.driver).scroll_from_origin(origin, 0, delta).perform()

    def logs(self) -> tuple[list[str], list[str]]:
        """What has happened since the last call: messages on the console, and addresses loaded."""
        console = [entry["message"] for entry in self.driver.get_log("browser")]
        events = [json.loads(e["message"])["message"] for e in self.driver.get_log("performance")]
        sent = [e["params"] for e in events if e["method"] == "Network.requestWillBeSent"]
        return console, [params["request"]["url"] for params in sent]

    def _mouse(self) -> Any:
        from selenium.webdriver.common.actions.action_builder import ActionBuilder

        self._actions = ActionBuilder(self.driver)
        return self._actions.pointer_action

    def _perform(self) -> None:
        self._actions.perform()


@contextmanager
def browser() -> Iterator[Browser]:
    """Start Chromium without a screen."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    # Without --no-sandbox Chromium refuses to run as root, as containers do.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1500,1150",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
