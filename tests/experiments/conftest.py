"""A browser, to look at the pages with, and temporary files that no other process sees."""

import os
import shutil
import tempfile

import pytest


@pytest.fixture(scope="session", autouse=True)
def _own_temporary_folder(tmp_path_factory):
    """Runs count those beside them by files in the folder for temporary files; other tests' runs do not count."""
    compiled = os.path.join(tempfile.gettempdir(), "torchinductor_tests")
    with pytest.MonkeyPatch.context() as patch:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:  # which is there too, and all tests share it
            patch.setenv("TORCHINDUCTOR_CACHE_DIR", compiled)
        patch.setenv("TMPDIR", str(tmp_path_factory.mktemp("temporary")))
        patch.setattr(tempfile, "tempdir", None)
        yield


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
