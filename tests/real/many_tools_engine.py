"""Fixtures: an engine with the model of `many_tools`, and its episodes played there, checked token by token.

The embedded engine runs on the test's own loop; the real SGLang is started once, when a test first asks for it.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from findings import ran_on
from many_tools import episodes
from many_tools.episodes import BY_QUESTION, Played
from real_server import start_sglang, version_of

from strands_rollout.engine import running_engine

CHECKPOINT: Final = Path(__file__).parent / "many_tools" / "checkpoint"
Play = Callable[..., Awaitable[Played]]


@pytest.fixture(scope="session")
def many_tools_sglang() -> Iterator[str]:
    """The URL of a real SGLang that serves the model."""
    server = start_sglang(CHECKPOINT)
    yield server.base_url
    server.stop()


@pytest.fixture
def on_sglang(request: pytest.FixtureRequest, many_tools_sglang: str) -> Play:
    """Plays the episode of a question on the real SGLang: `played = await on_sglang("Say hello.")`."""
    ran_on(request.node, f"SGLang {version_of(many_tools_sglang)}")
    return _playing(many_tools_sglang)


@pytest.fixture(params=["embedded", pytest.param("sglang", marks=pytest.mark.real)])
async def many_tools_engine(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    """The URL of each engine in turn that serves the model."""
    if request.param == "sglang":
        url = request.getfixturevalue("many_tools_sglang")
        ran_on(request.node, f"SGLang {version_of(url)}")
        yield url
    else:
        ran_on(request.node, "the embedded engine")
        async with running_engine(CHECKPOINT) as url:
            yield url


@pytest.fixture
def play(many_tools_engine: str) -> Play:
    """Plays the episode of a question on each engine in turn."""
    return _playing(many_tools_engine)


def tool_results(*texts: str) -> str:
    """What the policy reads of its calls' results."""
    return "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in texts)


def _playing(url: str) -> Play:
    async def play(question: str, *, by_heart: bool = True, temperature: float = 0.0, **settings: object) -> Played:
        """The episode, of valid samples, in which the policy says what it has learned; not so where that is open."""
        played = await episodes.play(BY_QUESTION[question], url, CHECKPOINT, temperature=temperature, **settings)
        assert played.violations == []
        assert not by_heart or played.said == played.learned
        return played

    return play
