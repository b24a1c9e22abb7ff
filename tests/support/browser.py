"""Pages in a real browser: Debian's chromium, without a window."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.patience import wait_for

PHONE = {"viewport": {"width": 390, "height": 844}, "is_mobile": True}


@contextmanager
def launched() -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("there is no chromium in PATH; on Debian, apt-get install chromium")
    with sync_playwright() as playwright:
        # The sandbox needs rights that a container lacks; the pages are this test's own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


def await_true(page: Page, expression: str, pause: float = 0.1) -> None:
    # Not wait_for_function, which the page's policy does not let evaluate a text again.
    wait_for(expression, lambda: page.evaluate(f"Boolean({expression})"), page.content, pause=pause)


class Opened:
    """A page in a tab of its own, with everything that went wrong in it."""

    def __init__(self, browser: Browser, url: str, **context: Any) -> None:
        self.context = browser.new_context(**context)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: self.errors.append(message.text))
        self.page.on("dialog", lambda dialog: self.errors.append(dialog.message))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(url)

    def await_true(self, expression: str, pause: float = 0.1) -> None:
        await_true(self.page, expression, pause)
