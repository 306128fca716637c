"""The search tool on a retrieval server and on a corpus, alone and in episodes."""

import asyncio
import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from fake_sglang import dead_url
from harness import TOOL_CALL, run
from search_server import DOCUMENTS, Answer, found, retrieval_server

from strands_rollout import Sample, reward_func
from strands_rollout.environments.search import DEFAULT_URL, search_tool
from strands_rollout.errors import ConfigError, SandboxError
from strands_rollout.slime_plugin.sample_contract import contract_violations

REPOSITORY = Path(__file__).parents[2]
CONFIG = REPOSITORY / "configs/search.yaml"
CORPUS = REPOSITORY / "strands_rollout/environments/search_corpus.jsonl"


async def test_search_tool_asks_in_search_r1s_protocol() -> None:
    async with retrieval_server() as (url, bodies):
        text = await search_tool(url=url, top_k=2)(query="who")
    assert bodies == [{"queries": ["who"], "topk": 2, "return_scores": True}]
    assert text == "Passage 1 (title: Alfred Nobel): He was born in Stockholm."


async def test_search_tool_reads_documents_without_scores() -> None:
    async with retrieval_server(lambda body, n: {"result": [[DOCUMENTS, {"title": "", "text": "plain"}]]}) as (url, _):
        text = await search_tool(url=url)(query="who")
    assert text.splitlines() == ["Passage 1 (title: Alfred Nobel): He was born in Stockholm.", "Passage 2: plain"]


async def test_search_tool_shows_at_most_top_k_passages() -> None:
    async with retrieval_server(lambda body, n: {"result": [[{"text": "best"}, {"text": "more"}]]}) as (url, _):
        assert await search_tool(url=url, top_k=1)(query="who") == "Passage 1: best"


async def test_search_tool_cuts_long_passages() -> None:
    async with retrieval_server(lambda body, n: {"result": [[{"text": "x" * 50}]]}) as (url, _):
        assert await search_tool(url=url, max_passage_chars=10)(query="who") == f"Passage 1: {'x' * 10} ..."


async def test_search_tool_empty_query_is_the_policys_error() -> None:
    assert await search_tool(url=dead_url())(query="  ") == "Error: the query is empty."


async def test_search_tool_without_results_says_so() -> None:
    async with retrieval_server(lambda body, n: {"result": [[]]}) as (url, _):
        assert await search_tool(url=url)(query="who") == "Nothing was found."


async def until_asked(bodies: list[dict[str, Any]], count: int) -> None:
    while len(bodies) < count:  # noqa: ASYNC110 - the server's list has no event
        await asyncio.sleep(0.001)


async def test_search_tool_sends_waiting_queries_together() -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any], number: int) -> Any:
        if number < 8:
            await release.wait()
        return {"result": [[{"text": query}] for query in body["queries"]]}

    async with retrieval_server(answer) as (url, bodies):
        search = search_tool(url=url)
        calls = [asyncio.ensure_future(search(query=str(number))) for number in range(100)]
        await until_asked(bodies, 8)
        release.set()
        assert await asyncio.gather(*calls) == [f"Passage 1: {number}" for number in range(100)]
    assert sorted(len(body["queries"]) for body in bodies) == [1] * 8 + [28, 64]


async def test_search_tool_cancelled_call_leaves_the_others() -> None:
    release = asyncio.Event()

    async def answer(body: dict[str, Any], number: int) -> Any:
        await release.wait()
        return found(body, number)

    async with retrieval_server(answer) as (url, bodies):
        search = search_tool(url=url)
        calls = [asyncio.ensure_future(search(query=str(number))) for number in range(20)]
        await until_asked(bodies, 8)
        for call in calls[::2]:
            call.cancel()
        release.set()
        results = await asyncio.gather(*calls, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [True, False] * 10


async def test_search_tool_repeats_failed_requests() -> None:
    def answer(body: dict[str, Any], number: int) -> Any:
        return web.Response(status=503) if number == 0 else found(body, number)

    async with retrieval_server(answer) as (url, bodies):
        assert "Stockholm" in await search_tool(url=url)(query="who")
    assert len(bodies) == 2


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda body, n: web.Response(status=422, text="no topk"),
            r"refused .* HTTP 422: no topk; .*Search-R1's",
        ),
        (lambda body, n: {"results": []}, "KeyError"),
        (lambda body, n: {"result": []}, "0 results for 1 queries"),
        (lambda body, n: {"result": [[{"document": {"id": 3}}]]}, r"got \{'id': 3\}; expected an object with"),
        (lambda body, n: web.Response(text="hello"), "answered 'hello' .*Search-R1's format"),
        (lambda body, n: web.Response(text="[" * 100_000), r"RecursionError.*Search-R1's format"),
    ],
)
async def test_search_tool_wrong_answer_is_a_server_fault(answer: Answer, message: str) -> None:
    async with retrieval_server(answer) as (url, _):
        with pytest.raises(SandboxError, match=message):
            await search_tool(url=url, patience_s=0)(query="who")


async def test_search_tool_dead_server_names_its_settings() -> None:
    with pytest.raises(SandboxError, match=r"gave no answer for 0 s.*ConnectError.*SEARCH_URL"):
        await search_tool(url=dead_url(), patience_s=0)(query="who")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://x", "corpus": "y"}, "expected only one of them"),
        ({"top_k": 0}, "top_k=0; expected at least 1"),
        ({"corpus": "/nowhere.jsonl"}, "'/nowhere.jsonl', which is not a file"),
    ],
)
def test_search_tool_refuses_its_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        search_tool(**options)


def test_search_tool_masks_secrets_in_its_refusal() -> None:
    with pytest.raises(ConfigError, match=r"got url='http://\*\*\*@x/\?key=\*\*\*' and corpus='y'"):
        search_tool(url="http://me:hush@x/?key=hush", corpus="y")


def test_search_module_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import strands_rollout.environments.search as module

    monkeypatch.setenv("SEARCH_URL", DEFAULT_URL.replace("://", "://me:hush@"))
    monkeypatch.setenv("SEARCH_CORPUS", str(CORPUS))
    with pytest.raises(ConfigError, match=r"got SEARCH_URL=http://\*\*\*@127.* set only one of them"):
        importlib.reload(module)
    monkeypatch.undo()
    importlib.reload(module)


async def test_search_tool_ranks_a_corpus() -> None:
    pytest.importorskip("bm25s")
    search = search_tool(corpus=CORPUS, top_k=1)
    for line in (CORPUS.with_name("search_questions.jsonl")).read_text().splitlines():
        question = json.loads(line)["prompt"][0]["content"]
        assert (await search(query=question)).startswith("Passage 1 (title: "), question
    assert "(title: Rudolf Diesel)" in await search(query="Rudolf Diesel born")
    assert await search(query="zzz qqq") == "Nothing was found."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no documents"),
        ('{"text": "a"}\n[1]', r":2 is not a document in JSON: got \[1\]"),
        ("{", ":1 is not a document in JSON: Expecting"),
        ("[" * 100_000, ":1 is not a document in JSON: maximum recursion depth"),
    ],
)
async def test_search_tool_broken_corpus_names_the_line(tmp_path: Path, content: str, message: str) -> None:
    pytest.importorskip("bm25s")
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=message):
        await search_tool(corpus=tmp_path / "corpus.jsonl")(query="a")


def turns(*queries: str, answer: str) -> list[str]:
    calls = [TOOL_CALL.format(name="search", arguments=json.dumps({"query": query})) for query in queries]
    return [*calls, f"{answer}<|im_end|>"]


async def play(tokenizer: Any, tmp_path: Path, url: str, patience_s: float, script: list[str]) -> Any:
    settings = yaml.safe_load(CONFIG.read_text())["strands_rollout"]
    (tmp_path / "own_search.py").write_text(
        "from strands_rollout.environments.search import search_tool\n"
        f"search = search_tool(url={url!r}, patience_s={patience_s})\n"
    )
    settings["tools"] = [f"{tmp_path}/own_search.py:search"]
    sample = Sample(prompt="Where was he born?", label=["Stockholm"], index=0)
    return await run(tokenizer, script, settings=settings, sample=sample)


async def test_generate_search_episode_is_exact_and_scored(shipped_tokenizer: Any, tmp_path: Path) -> None:
    async with retrieval_server() as (url, _):
        script = turns("inventor", "birthplace", answer="<answer>stockholm.</answer>")
        played = await play(shipped_tokenizer, tmp_path, url, 30, script)
    sample = played.sample
    sample.reward = await reward_func(played_args(), sample)
    assert (sample.status.value, sample.reward["score"], sample.reward["acc"]) == ("completed", 1.0, 1.0)
    assert contract_violations(sample, decode=played.decode, reward_key="score") == []
    assert played.decode(sample.tokens).count("He was born in Stockholm.") == 2


def played_args() -> Any:
    from types import SimpleNamespace

    return SimpleNamespace(strands_rollout={"reward": yaml.safe_load(CONFIG.read_text())["strands_rollout"]["reward"]})


async def test_generate_dead_retrieval_server_is_not_trained(shipped_tokenizer: Any, tmp_path: Path) -> None:
    played = await play(shipped_tokenizer, tmp_path, dead_url(), 0, turns("inventor", answer="unread"))
    facts = played.sample.metadata["strands_rollout"]
    assert (played.sample.status.value, facts["stop_reason"]) == ("failed", "sandbox_error")
    assert "retrieval server" in facts["error"]
