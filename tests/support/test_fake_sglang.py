"""`FakeSGLang` reports requests that break the token-in/token-out rule."""

import aiohttp
from fake_sglang import FakeSGLang, Reply


async def test_fake_sglang_reports_a_changed_token() -> None:
    async with FakeSGLang(lambda _request, _n: Reply.tokens([5, 6])) as fake, aiohttp.ClientSession() as http:
        for ids in ([1, 2], [1, 2, 5, 6, 9], [1, 2, 5, 6, 9], [1, 2, 5, 6, 9, 5, 6, 3], [1, 2]):
            await http.post(f"{fake.base_url}/generate", json={"input_ids": ids})
        assert fake.violations == []
        await http.post(f"{fake.base_url}/generate", json={"input_ids": [1, 2, 5, 7, 9]})
    assert fake.violations == [
        "request 5: its 5 ids don't extend the 4 ids of the latest answered request and its output; they differ from "
        "position 3 on"
    ]
