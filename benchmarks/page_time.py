"""How long a timeline page takes to open in a headless Chromium, and how large it is.

    dbo-fx show mlp_shared_overlap --layers 61 --html page.html
    python benchmarks/page_time.py page.html

Prints one JSON object. From the start of loading until everything is drawn; a fresh browser, the
file in the page cache; the median of some runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from pathlib import Path


def has_browser() -> bool:
    """Whether Chromium, its driver and selenium are here."""
    from importlib.util import find_spec

    return all(map(shutil.which, ("chromium", "chromedriver"))) and bool(find_spec("selenium"))


def opened_s(page: Path) -> float:
    """Seconds until the page says that it is drawn."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.support.ui import WebDriverWait

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    # As root, which containers use, Chromium starts only without its sandbox.
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.add_argument("--window-size=1500,1150")
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(page.resolve().as_uri())
        ready = WebDriverWait(driver, 120).until(
            lambda d: d.execute_script("return document.body.dataset.readyMs")
        )
    finally:
        driver.quit()
    return float(ready) / 1000


def main() -> None:
    """Parse arguments, print JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    seconds = [opened_s(args.page) for _ in range(args.runs)]
    print(
        json.dumps(
            {
                "page_mb": round(args.page.stat().st_size / 1e6, 2),
                "opened_s": round(statistics.median(seconds), 2),
                "runs_s": [round(s, 2) for s in seconds],
            }
        )
    )


if __name__ == "__main__":
    main()
