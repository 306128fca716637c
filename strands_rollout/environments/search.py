"""A search tool: `tools: [strands_rollout.environments.search.search]`.

The tool queries a retrieval server with Search-R1's protocol, or a BM25 index in this process. The index needs the
extra `search`. `configs/search.yaml` uses this tool. For other options, make a tool in a file of your own:

    from strands_rollout.environments.search import search_tool

    search = search_tool(url="http://127.0.0.1:8000/retrieve", top_k=5)
"""

import asyncio
import functools
import json
import os
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from strands import tool
from strands.types.tools import AgentTool

from strands_rollout.aio import LoopCache
from strands_rollout.client.retry import Fault, FaultKind, RetriesExhaustedError, RetryPolicy, with_retries
from strands_rollout.client.transport import fault_of_status
from strands_rollout.errors import ConfigError, EngineRejectedError, SandboxError
from strands_rollout.own_thread import in_own_thread
from strands_rollout.secret_mask import mask_text
from strands_rollout.user_code import find_file

DEFAULT_URL: Final = "http://127.0.0.1:8000/retrieve"  # URL of Search-R1's retrieval server
_MAX_QUERIES_PER_REQUEST: Final = 64
_MAX_REQUESTS: Final = 8


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage of the corpus; the title may be empty."""

    title: str
    text: str

    @classmethod
    def from_document(cls, document: object) -> "Passage":
        """Return the passage of a document with `title` and `text`, or with Search-R1's `contents`.

        The first line of `contents` is the title, if another line follows.

        Raises:
            ValueError: The document has no string as `contents` or `text`.
        """
        found = document if isinstance(document, Mapping) else {}
        if isinstance(contents := found.get("contents"), str):
            title, newline, rest = contents.partition("\n")
            return cls(title.strip('" '), rest) if newline else cls("", contents)
        if isinstance(text := found.get("text"), str):
            return cls(str(found.get("title") or ""), text)
        raise ValueError(
            f"got {document!r:.200}; expected an object with 'contents', or with 'text' and an optional 'title'"
        )


Retrieve = Callable[[str], Awaitable[Sequence[Passage]]]
"""A function that returns the passages for a query, the best first."""


def search_tool(
    *,
    url: str | None = None,
    corpus: str | Path | None = None,
    top_k: int = 3,
    max_passage_chars: int = 2000,
    timeout_s: float = 20.0,
    patience_s: float = 30.0,
) -> AgentTool:
    """Return the tool `search`, which returns the best passages for a query as text.

    Args:
        url: Endpoint of a retrieval server. It takes `{"queries": [...], "topk": 3, "return_scores": true}` and returns
            `{"result": [[{"document": {"contents": ...}, "score": ...}, ...], ...]}`, a list for each query. Default:
            `DEFAULT_URL`.
        corpus: Instead of a server: a JSON Lines file of documents with `title` and `text`, or with `contents`. Each
            process builds its own BM25 index on the first call.
        top_k: Number of passages to request; the result has fewer if fewer are found.
        max_passage_chars: Maximum characters of a passage; longer passages are cut.
        timeout_s: Limit in seconds on connecting, and on each write and each read of a request (httpx's `Timeout`).
        patience_s: How long to retry a failed request, in seconds. After that, the episode fails because of an
            infrastructure fault. The policy never sees this fault. `tool_timeout_s` must exceed `timeout_s` plus
            `patience_s`.

    Raises:
        ConfigError: Both a URL and a corpus are given; `top_k` is less than 1; the corpus is not a file; or a corpus
            needs the extra `search`, which isn't installed. The first call raises it if the corpus is empty or can't be
            parsed.
    """
    if url is not None and corpus is not None:
        shown = mask_text(url)
        raise ConfigError(f"search_tool got url={shown!r} and corpus={str(corpus)!r}; expected only one of them")
    if top_k < 1:
        raise ConfigError(f"search_tool got top_k={top_k}; expected at least 1")
    if corpus is not None:
        path = _check_corpus(corpus)
        retrieve: Retrieve = functools.partial(_retrieve_locally, path, top_k)
    else:
        retrieve = _RetrievalServer(url or DEFAULT_URL, top_k, timeout_s, RetryPolicy(patience_s=patience_s)).retrieve

    @tool
    async def search(query: str) -> str:
        """Search for passages that help to answer a question.

        Args:
            query: What to search for, in a few words.
        """
        if not query.strip():
            return "Error: the query is empty."
        passages = await retrieve(query)
        texts = (_format_passage(number, passage, max_passage_chars) for number, passage in enumerate(passages, 1))
        return "\n".join(texts) or "Nothing was found."

    return search


def _format_passage(number: int, passage: Passage, max_chars: int) -> str:
    title = f" (title: {passage.title})" if passage.title else ""
    text = passage.text if len(passage.text) <= max_chars else f"{passage.text[:max_chars]} ..."
    return f"Passage {number}{title}: {text}"


class _RetrievalServer:
    """A client of a retrieval server.

    A query is sent immediately, unless `_MAX_REQUESTS` requests of its event loop are running. Then queries wait, and
    are sent together in one request: a dense retriever answers many queries in the time of one.
    """

    def __init__(self, url: str, top_k: int, timeout_s: float, policy: RetryPolicy) -> None:
        self._url, self._top_k, self._timeout_s, self._policy = url, top_k, timeout_s, policy
        self._batchers: LoopCache[_Batcher] = LoopCache()

    async def retrieve(self, query: str) -> Sequence[Passage]:
        passages = await self._batchers.get("batcher", lambda: _Batcher(self._ask)).submit(query)
        return passages[: self._top_k]

    async def _ask(self, queries: Sequence[str]) -> list[Sequence[Passage]]:
        client = _CLIENTS.get("search", lambda: httpx.AsyncClient(limits=httpx.Limits(max_connections=64)))
        body = {"queries": list(queries), "topk": self._top_k, "return_scores": True}

        async def attempt() -> httpx.Response | Fault:
            try:
                answer = await client.post(self._url, json=body, timeout=self._timeout_s)
            except (httpx.HTTPError, httpx.InvalidURL) as e:
                return Fault(FaultKind.UNREACHABLE, f"{type(e).__name__}: {mask_text(str(e))}")
            if answer.status_code == httpx.codes.OK:
                return answer
            return fault_of_status(answer.status_code, answer.content, answer.headers, url=server, endpoint="")

        server = f"the retrieval server {mask_text(self._url)}"
        try:
            answer = await with_retries(attempt, self._policy)
        except RetriesExhaustedError as e:
            raise SandboxError(
                f"{server} gave no answer for {self._policy.patience_s:g} s; the last request failed with: {e}. "
                "Start the server, or set its address: SEARCH_URL for the shipped tool, url= for a tool of your own"
            ) from None
        except EngineRejectedError as e:
            raise SandboxError(f"{e}; expected a server that speaks Search-R1's protocol") from e
        try:
            return _parse_answer(answer, len(queries))
        except (AttributeError, ValueError, LookupError, TypeError, RecursionError) as e:
            raise SandboxError(
                f"{server} answered {answer.text[:200]!r} ({type(e).__name__}: {e}); expected Search-R1's format, "
                '{"result": [[{"document": {"contents": "..."}}, ...], ...]}'
            ) from e


_CLIENTS: Final[LoopCache[httpx.AsyncClient]] = LoopCache()


def _parse_answer(answer: httpx.Response, query_count: int) -> list[Sequence[Passage]]:
    results = answer.json()["result"]
    if len(results) != query_count:
        raise ValueError(f"{len(results)} results for {query_count} queries")
    # without scores, an entry is the document itself
    return [[Passage.from_document(entry.get("document", entry)) for entry in entries] for entries in results]


class _Batcher:
    """Queue that combines the queries of an event loop into requests."""

    def __init__(self, ask: Callable[[Sequence[str]], Awaitable[list[Sequence[Passage]]]]) -> None:
        self._ask = ask
        self._waiting: list[tuple[str, asyncio.Future[Sequence[Passage]]]] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    async def aclose(self) -> None:
        self._is_closed = True
        for request in self._requests:
            request.cancel()

    async def submit(self, query: str) -> Sequence[Passage]:
        future: asyncio.Future[Sequence[Passage]] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        self._start_requests()
        return await future

    def _start_requests(self) -> None:
        while self._waiting and len(self._requests) < _MAX_REQUESTS:
            batch, self._waiting = self._waiting[:_MAX_QUERIES_PER_REQUEST], self._waiting[_MAX_QUERIES_PER_REQUEST:]
            request = asyncio.create_task(self._request([entry for entry in batch if not entry[1].done()]))
            self._requests.add(request)
            request.add_done_callback(self._on_done)

    def _on_done(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        self._start_requests()

    async def _request(self, batch: Sequence[tuple[str, asyncio.Future[Sequence[Passage]]]]) -> None:
        try:
            answers = await self._ask([query for query, _ in batch]) if batch else []
            for (_, future), passages in zip(batch, answers, strict=True):
                if not future.done():  # a cancelled tool call has cancelled its future
                    future.set_result(passages)
        except Exception as e:  # the failure is the result of every query of the request
            for _, future in batch:
                if not future.done():
                    future.set_exception(e)
        finally:
            for _, future in batch:
                future.cancel()  # has an effect only if this request was cancelled; otherwise all futures are done


def _check_corpus(corpus: str | Path) -> Path:
    path = find_file(str(corpus))
    if not path.is_file():
        raise ConfigError(f"search_tool got corpus={str(corpus)!r}, which is not a file; expected a JSON Lines file")
    try:
        import bm25s  # noqa: F401
    except ModuleNotFoundError as e:
        raise ConfigError(f"{e.name} isn't installed; run: pip install 'strands-rollout[search]'") from e
    return path.resolve()


async def _retrieve_locally(path: Path, top_k: int, query: str) -> Sequence[Passage]:
    return await in_own_thread(lambda: _get_index(path).search(query, top_k), has_grace_period=False)()


class _Index:
    """A BM25 index of a corpus in memory."""

    def __init__(self, path: Path) -> None:
        import bm25s

        self._passages = _read_corpus(path)
        self._tokenize = functools.partial(bm25s.tokenize, stopwords="en", show_progress=False)
        self._bm25 = bm25s.BM25()
        texts = [f"{passage.title} {passage.text}" for passage in self._passages]
        self._bm25.index(self._tokenize(texts), show_progress=False)

    def search(self, query: str, top_k: int) -> Sequence[Passage]:
        """Return at most `top_k` passages that share a word with the query, the best first."""
        numbers, scores = self._bm25.retrieve(
            self._tokenize([query]), k=min(top_k, len(self._passages)), show_progress=False
        )
        return [self._passages[number] for number, score in zip(numbers[0], scores[0], strict=True) if score > 0]


_index_lock: Final = threading.Lock()


def _get_index(path: Path) -> _Index:
    with _index_lock:  # concurrent calls must not build the index twice
        return _build_index(path)


@functools.cache
def _build_index(path: Path) -> _Index:
    return _Index(path)


def _read_corpus(path: Path) -> list[Passage]:
    passages = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    passages.append(Passage.from_document(json.loads(line)))
                except (ValueError, RecursionError) as e:
                    raise ConfigError(f"{path}:{number} is not a document in JSON: {e}") from e
    if not passages:
        raise ConfigError(f"{path} has no documents; expected one JSON object on each line")
    return passages


def _tool_from_environment() -> AgentTool:
    url, corpus = os.environ.get("SEARCH_URL"), os.environ.get("SEARCH_CORPUS")
    if url and corpus:
        raise ConfigError(
            f"got SEARCH_URL={mask_text(url)} and SEARCH_CORPUS={corpus} in the environment; set only one of them"
        )
    return search_tool(url=url or None, corpus=corpus or None)


search: Final = _tool_from_environment()
"""The tool for the server at `$SEARCH_URL` or the corpus at `$SEARCH_CORPUS`.

If neither environment variable is set, the server is at `DEFAULT_URL`.
"""
