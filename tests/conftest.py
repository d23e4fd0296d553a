"""Settings of every test."""

import os
import shutil

# The tensors of the tests are tiny: threads would only wait for each other, and for other processes. The variable is
# read by NumPy's and torch's libraries when they are loaded, here and in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test of transformers may download anything; read when it is imported

import pytest
import torch

torch.set_num_threads(1)

SLOW = {
    "test_a_block_is_planned_run_recorded_compared_and_not_run_again",
    "test_a_graph_is_compiled",
    "test_a_kill_while_the_settings_are_written_leaves_the_folder_free",
    "test_a_killed_worker_costs_nothing_but_time",
    "test_a_run_learns_and_records_what_it_did",
    "test_a_write_that_the_system_cuts_off_keeps_the_last_checkpoint",
    "test_compiled_gradients_of_a_pack",
    "test_compiled_runs_together_are_each_alone",
    "test_evaluations_at_once_are_all_recorded",
    "test_killed_at_random_moments_it_ends_as_if_nothing_had_happened",
    "test_predictions_are_made_once",
    "test_runs_that_end_together_leave_the_record_of_their_ensemble",
    "test_the_command_tries_all_and_writes_one_record",
    "test_the_tables_of_the_pages_are_those_of_the_records",
    "test_two_processes_are_the_plain_loop",
}
"""Tests that take longer than 10 s on one core, by name: they are marked `slow`."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """What a command says is not broken into lines by the length of a temporary folder's name."""
    monkeypatch.setenv("COLUMNS", "200")


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


def pytest_collection_modifyitems(items):
    """Mark the tests that take long, and those that look at pages in a browser."""
    for item in items:
        if getattr(item, "originalname", None) in SLOW:
            item.add_marker(pytest.mark.slow)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)


def pytest_make_parametrize_id(val, argname):
    """Name long bytes by their argument: an archive holds the time, and all processes must give a test one name."""
    return argname if isinstance(val, bytes) and len(val) > 20 else None
