from collections.abc import AsyncIterator

import pytest
from chromium import Page, browser_page

DESKTOP = (1400, 900)


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    async with browser_page() as opened:
        await opened.screen(*DESKTOP)
        yield opened
        assert opened.console == []
