"""A browser, to look at the pages with."""

import shutil

import pytest


@pytest.fixture(scope="module")
def browser():
    """Chromium without a window, driven by Playwright; the test is skipped where there is no such browser."""
    executable = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if executable is None:
        pytest.skip("needs the browser chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable)
        yield browser
        browser.close()
