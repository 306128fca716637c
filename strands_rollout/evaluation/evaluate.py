"""Plays samples through `generate` and `reward_func`, called as slime calls them, on a running or the embedded engine.

Token exactness is checked against what crossed the wire, not against the model's own record.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, pairwise, takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import aiohttp
import orjson
from aiohttp import web

from strands_rollout.agent.tool_loading import end_mcp_connections
from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.code_tool.local import LocalExecutor
from strands_rollout.engine import engine_process
from strands_rollout.errors import ConfigError, EngineResponseError, EngineUnavailableError
from strands_rollout.evaluation.rows import Row
from strands_rollout.samples import EpisodeFacts, Sample, facts_of, finished_samples, reward_details
from strands_rollout.settings import REWARD_KEY
from strands_rollout.slime_plugin.generate import generate
from strands_rollout.slime_plugin.reward import reward_func
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.slime_plugin.workers import workers_here

if TYPE_CHECKING:
    import httpx
    from transformers import PreTrainedTokenizerBase

Generate: TypeAlias = Callable[..., Awaitable[Any]]
Reward: TypeAlias = Callable[..., Awaitable[Any]]
"""Of slime's `--custom-generate-function-path` and `--custom-rm-path`."""


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What to run the rows with.

    `sampling_params` are as slime hands them to `generate`: `max_new_tokens` is the budget of a whole response. `seed`
    is the first sample's, the next one's is one more. `settings` is the mapping under `strands_rollout:` of a custom
    config.
    """

    base_url: str
    tokenizer_dir: Path
    sampling_params: Mapping[str, Any]
    concurrency: int = 16
    seed: int | None = None
    settings: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished episode, and the violations found in it.

    `siblings` are its further samples, where it fanned out; `contract_violations` are of all its samples,
    `tito_violations` of the main agent's.
    """

    sample: Sample
    contract_violations: list[str]
    tito_violations: list[str]
    siblings: Sequence[Sample] = ()

    @property
    def facts(self) -> EpisodeFacts:
        """The episode's facts, from the sample's metadata."""
        return facts_of(self.sample)

    @property
    def graded(self) -> Mapping[str, Any]:
        """What the reward function found; empty where it was not asked, or gave only a number."""
        return reward_details(self.sample)


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run; the means are of the samples that neither failed nor had a reward that did."""

    samples: int
    completed: int
    mean_reward: float
    accuracy: float
    tool_calls: int
    tito_violations: int
    contract_violations: int

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> Summary:
        """The totals of these outcomes."""
        views = finished_samples([outcome.sample for outcome in outcomes])
        graded = [view.graded for view in views if view.graded and not view.is_missing]
        count = max(len(graded), 1)
        return cls(
            samples=len(outcomes),
            completed=sum(outcome.sample.status is Sample.Status.COMPLETED for outcome in outcomes),
            mean_reward=round(sum(float(reward[REWARD_KEY]) for reward in graded) / count, 4),
            accuracy=round(sum(bool(reward["acc"]) for reward in graded) / count, 4),
            tool_calls=sum(outcome.facts.tool_calls or 0 for outcome in outcomes),
            tito_violations=sum(len(outcome.tito_violations) for outcome in outcomes),
            contract_violations=sum(len(outcome.contract_violations) for outcome in outcomes),
        )

    @property
    def ok(self) -> bool:
        """Whether something was completed and nothing was violated."""
        return self.completed > 0 and not self.tito_violations and not self.contract_violations

    def to_dict(self) -> dict[str, int | float]:
        """The totals by name, in this order."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Player:
    """Plays one sample after another on an engine; see `playing`, whose arguments it keeps."""

    args: SimpleNamespace
    tokenizer: PreTrainedTokenizerBase
    recorder: WireRecorder | None
    audited: bool
    evaluation: bool
    generate: Generate | None = None
    reward: Reward | None = None

    async def play(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Outcome:
        """Fill a new sample and grade it, and its siblings where it fans out; raises nothing but CancelledError."""
        sample.session_id = sample.session_id or uuid.uuid4().hex
        given = await (self.generate or generate)(self.args, sample, sampling_params, evaluation=self.evaluation)
        done, *siblings = given if isinstance(given, list) else [given]
        if done.status is not Sample.Status.ABORTED:
            await self.grade(done, *siblings)
        # taken out: the recorder would keep the tokens of a whole run
        exchanges = self.recorder.episodes.pop(str(done.session_id), []) if self.recorder else []
        if not self.audited:
            return Outcome(done, [], [], siblings)
        broken = [contract_violations(one, decode=self.decode, reward_key=REWARD_KEY) for one in [done, *siblings]]
        return Outcome(done, [*chain.from_iterable(broken)], tito_violations(exchanges, done), siblings)

    async def grade(self, sample: Sample, *siblings: Sample) -> None:
        """Set a sample's reward; with siblings, as slime does, by one call with the list of all."""
        grade: Reward = self.reward or reward_func
        if not siblings:
            sample.reward = await grade(self.args, sample)
            return
        together = [sample, *siblings]
        for one, reward in zip(together, await grade(self.args, together), strict=True):
            one.reward = reward

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))


@asynccontextmanager
async def playing(
    base_url: str,
    tokenizer_dir: Path,
    settings: Mapping[str, Any] | None,
    *,
    audited: bool,
    evaluation: bool = False,
    max_context_tokens: int | None = None,
    generate: Generate | None = None,
    reward: Reward | None = None,
    workers: int = 0,
) -> AsyncIterator[Player]:
    """Play samples on an engine while the block lasts.

    slime's args name a host and a port: any other URL is reached through the recording proxy, as if it were audited.

    Args:
        base_url: The engine's.
        tokenizer_dir: The served model's tokenizer.
        settings: The mapping under `strands_rollout:` of a custom config.
        audited: Check each sample against its contract and against the wire.
        evaluation: Tell `generate` that this is an evaluation.
        max_context_tokens: slime's `eval_max_context_len`; None for the engine's own limit.
        generate: Plays episodes in place of this package's, with slime's signature.
        reward: Grades them, likewise.
        workers: Processes that play the episodes; 0: this one.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    url = parse_base_url(base_url)
    is_plain = url.scheme == "http" and url.path == "/" and not url.userinfo
    async with AsyncExitStack() as stack:
        stack.enter_context(workers_here(workers))
        recorder = None if is_plain and not audited else await stack.enter_async_context(recording(base_url))
        reached = url if recorder is None else parse_base_url(recorder.url)
        args = _args(reached, tokenizer_dir, _with_workers(settings or {}, workers), max_context_tokens)
        args.custom_rm_path = "strands_rollout.reward_func" if reward in (None, reward_func) else None
        stack.callback(end_mcp_connections)  # a server that does not answer would hold up Ctrl-C
        yield Player(args, load_tokenizer(str(tokenizer_dir)), recorder, audited, evaluation, generate, reward)


def _with_workers(settings: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """The settings with so many episode workers; their own hold where this process is connected to a Ray."""
    ray = sys.modules.get("ray")
    has_own = not count and ray is not None and ray.is_initialized()
    return settings if has_own else {**settings, "episode_workers": count}


def _args(
    url: httpx.URL, tokenizer_dir: Path, settings: Mapping[str, Any], max_context_tokens: int | None
) -> SimpleNamespace:
    """The args of slime, as far as this package reads them."""
    host, port = f"[{url.host}]" if ":" in url.host else url.host, url.port or 80
    named = settings.get("model_name")
    return SimpleNamespace(
        hf_checkpoint=str(tokenizer_dir),
        sglang_router_ip=host,
        sglang_router_port=port,
        # the one engine there is serves the policy under any name that the settings give it
        sglang_model_routers={named: (host, port)} if named else None,
        reward_key=REWARD_KEY,
        eval_reward_key="acc",
        eval_max_context_len=max_context_tokens,
        strands_rollout=settings,
    )


async def evaluate(
    rows: Sequence[Row], plan: RunPlan, *, on_done: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """One checked sample per row, in the order of the rows; `on_done` is called with each outcome.

    Raises:
        ConfigError: The URL or the tokenizer can't be used.
    """
    gate = asyncio.Semaphore(plan.concurrency)
    settings = {**(plan.settings or {}), "max_failed_groups": None}  # nothing is trained: every row is played
    async with playing(plan.base_url, plan.tokenizer_dir, settings, audited=True) as player:

        async def run(index: int, row: Row) -> Outcome:
            sample = row.sample(index=index, group_index=index)
            seed = {} if plan.seed is None else {"sampling_seed": plan.seed + index}
            async with gate:
                outcome = await player.play(sample, {**plan.sampling_params, **seed})
            on_done(outcome)
            return outcome

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(index, row)) for index, row in enumerate(rows)]
    return [task.result() for task in tasks]


SHIPPED_MODELS_EXECUTOR: Final = {"name": "local", "isolation": "rlimits"}
"""Our own model's code needs no Linux to run; the strongest isolation there is is used in any case."""


@asynccontextmanager
async def served_engine(base_url: str | None, model_dir: Path | None) -> AsyncIterator[str]:
    """The URL of an engine that runs already, or else of the embedded one, for as long as the block lasts.

    Raises:
        EngineUnavailableError: Nothing answers at the URL, which episodes would find out after a minute of retries.
    """
    if base_url is None:
        async with engine_process(model_dir) as url:
            yield url
        return
    with suppress(EngineResponseError):  # it is busy, which may pass
        await ask_engine(base_url)
    yield base_url


async def ask_engine(base_url: str) -> ServerInfo:
    """Ask the engine for its model, tokenizer and limits.

    Raises:
        ConfigError: The URL is not one of an HTTP server.
        EngineUnavailableError: Nothing answers.
    """
    async with create_client(base_url) as http:
        url = redacted(http.base_url)
        try:
            return await fetch_server_info(http, url=url)
        except EngineUnavailableError as e:
            raise EngineUnavailableError(
                f"no engine answers at {url}: {_cause_of(e)}; start one there (SGLang's server, or "
                "`strands-rollout serve`), or correct --base-url"
            ) from e


def _cause_of(error: Exception) -> str:
    """What the operating system said, as in "Connection refused"; else the error's own words."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno:
            return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)
        cause = cause.__cause__ or cause.__context__
    return str(error)


def check_is_engine(info: ServerInfo, base_url: str) -> None:
    """Raise ConfigError where a server names no model."""
    if (info.raw.get("tokenizer_path") or info.model_path) is None:
        got = f"the engine at {redacted(parse_base_url(base_url))} names no model"
        raise ConfigError(f"{got}, as an SGLang server or router would; check the URL's port")


def tokenizer_folder(info: ServerInfo, base_url: str) -> Path:
    """The folder of the tokenizer that an engine says it uses.

    Raises:
        ConfigError: It names none, or none on this machine.
    """
    check_is_engine(info, base_url)
    named = info.raw.get("tokenizer_path") or info.model_path
    if not isinstance(named, str) or not Path(named).is_dir():
        got = f"names the tokenizer {named!r}, which is not a folder on this machine"
        remedy = "pass the served model's tokenizer with --tokenizer DIR"
        raise ConfigError(f"the engine at {redacted(parse_base_url(base_url))} {got}; {remedy}")
    return Path(named)


async def served_tokenizer(base_url: str) -> Path:
    """Ask an engine for the folder of its tokenizer; see `ask_engine` and `tokenizer_folder` for what is raised."""
    return tokenizer_folder(await ask_engine(base_url), base_url)


async def start_executor(setting: str | Mapping[str, Any]) -> str:
    """Start the code sandbox before episodes need it; returns its isolation, "unknown" where it does not report it.

    Raises:
        ConfigError: There is no such executor.
        SandboxError: It can't be started.
    """
    sandbox = shared_executor(setting)
    return (await sandbox.start()).isolation if isinstance(sandbox, LocalExecutor) else "unknown"


ROUTING_HEADER: Final = "X-SMG-Routing-Key"
_MAX_BODY_BYTES: Final = 1 << 28
_HOP_HEADERS: Final = frozenset(
    {"connection", "content-encoding", "content-length", "host", "keep-alive", "transfer-encoding"}
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One `/generate` request and its answer, in the order of the requests.

    Attributes:
        input_ids: As the engine received them.
        output_ids: As the engine answered them; None where it gave no generation (an error, a cut connection).
        logprobs: Beside the output ids; empty if none were asked for.
        has_images: Whether the request held images, of which the engine makes more tokens than it was sent.
        read_tokens: Tokens of the input that the engine says it read, where that is not all of `input_ids`.
    """

    input_ids: list[int]
    output_ids: list[int] | None
    logprobs: list[float]
    has_images: bool = False
    read_tokens: int | None = None

    @property
    def sequence(self) -> list[int]:
        """All that the engine read and wrote."""
        return [*self.input_ids, *(self.output_ids or [])]


class WireRecorder:
    """The running proxy: the URL where it listens, and the exchanges by routing key, "" for requests without one."""

    def __init__(self, session: aiohttp.ClientSession, target: str) -> None:
        self._session, self._target = session, target
        self.url = ""
        self.episodes: dict[str, list[Exchange]] = {}

    async def forward(self, request: web.Request) -> web.Response:
        """Send a request on to the engine; a generation is recorded in its episode, in the order of the requests."""
        body = await request.read()
        episode: list[Exchange] = []
        if request.path == "/generate" and request.method == "POST":
            asked = _object(body)
            episode = self.episodes.setdefault(request.headers.get(ROUTING_HEADER, ""), [])
            episode.append(Exchange(list(asked.get("input_ids") or []), None, [], bool(asked.get("image_data"))))
        index = len(episode) - 1
        try:
            answer, content = await self._send(request, body)
        except aiohttp.ClientError as e:
            # the engine gave no answer: the client must see that, not a status that the engine never sent
            if request.transport is not None:
                request.transport.close()
            return web.Response(status=502, text=f"{type(e).__name__}: {e}")
        if episode and answer.status == 200:
            episode[index] = _answered(episode[index], content)
        return answer

    async def _send(self, request: web.Request, body: bytes) -> tuple[web.Response, bytes]:
        url, headers = f"{self._target}{request.rel_url}", _end_to_end(request.headers)
        async with self._session.request(
            request.method, url, data=body or None, headers=headers, allow_redirects=False
        ) as answer:
            content = await answer.read()
            return web.Response(status=answer.status, body=content, headers=_end_to_end(answer.headers)), content


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_HEADERS}


@asynccontextmanager
async def recording(base_url: str) -> AsyncIterator[WireRecorder]:
    """Run a proxy before the engine at `base_url`, on a free port of 127.0.0.1, until the block ends.

    When a client goes away, its request to the engine is cancelled too, as without the proxy.

    Raises:
        ConfigError: `base_url` is not that of an HTTP server.
    """
    target = parse_base_url(base_url)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10.0)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=True) as session:
        recorder = WireRecorder(session, str(target).rstrip("/"))
        async with local_server(web.route("*", "/{path:.*}", recorder.forward)) as recorder.url:
            yield recorder


@asynccontextmanager
async def local_server(route: web.RouteDef) -> AsyncIterator[str]:
    """Answer a route on a free port of 127.0.0.1 until the block ends; yields its URL."""
    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([route])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def _answered(asked: Exchange, body: bytes) -> Exchange:
    answer = _object(body)
    if not isinstance(answer.get("output_ids"), list):
        return asked
    meta = answer.get("meta_info") or {}
    logprobs = [entry[0] for entry in meta.get("output_token_logprobs") or []]
    read = meta.get("prompt_tokens")
    return replace(
        asked,
        output_ids=answer["output_ids"],
        logprobs=logprobs,
        read_tokens=None if read == len(asked.input_ids) else read,
    )


def _object(body: bytes) -> Mapping[str, Any]:
    """The JSON object of a body; empty where it holds none."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}


def tito_violations(exchanges: Sequence[Exchange], sample: Sample) -> list[str]:
    """Every break of token-in/token-out in one episode, each as a sentence.

    Each request must extend the last one's ids and its output; one that got no generation is sent again unchanged. A
    sample that trains anything must hold the last sequence, and train the ids that were sampled, all of them, at the
    logprobs that came with them; and the engine must have read all tokens of each request. Of an episode with images,
    of which the engine makes tokens itself, only the sampled ids and their logprobs are compared.
    """
    return [*_broken_extensions(exchanges), *_wrong_sample(exchanges, sample)]


def _broken_extensions(exchanges: Sequence[Exchange]) -> Iterator[str]:
    for number, (previous, exchange) in enumerate(pairwise(exchanges), start=1):
        got, read = exchange.input_ids, previous.sequence
        if previous.output_ids is None and got != read:
            yield f"request {number} repeats a failed one{_difference(got, read)}"
        elif got[: len(read)] != read:
            yield f"request {number} does not extend the last one and its output{_difference(got, read)}"


def _wrong_sample(exchanges: Sequence[Exchange], sample: Sample) -> Iterator[str]:
    if not any(sample.loss_mask or []):
        return
    answered = [exchange for exchange in exchanges if exchange.output_ids]
    if not answered:
        yield "the sample trains tokens, but the engine sampled none"
        return
    if any(exchange.has_images for exchange in answered):
        yield from _wrong_sampled(answered, sample)
        return
    for exchange in answered:
        if exchange.read_tokens is not None:
            yield f"the engine read {exchange.read_tokens} tokens of a request of {len(exchange.input_ids)}"
    sequence = answered[-1].sequence
    if sample.tokens != sequence:
        yield f"the sample's tokens are not the last request and its output{_difference(sample.tokens, sequence)}"
        return
    prompt_length = len(sample.tokens) - sample.response_length
    if prompt_length != len(answered[0].input_ids):
        yield f"the sample's prompt has {prompt_length} tokens; the first request had {len(answered[0].input_ids)}"
    else:
        yield from _wrong_training(answered, sample, prompt_length)


def _wrong_training(answered: Sequence[Exchange], sample: Sample, prompt_length: int) -> Iterator[str]:
    mask, logprobs = [0] * len(sample.tokens), [0.0] * len(sample.tokens)
    for exchange in answered:
        start, output = len(exchange.input_ids), exchange.output_ids or []
        mask[start : start + len(output)] = [1] * len(output)
        logprobs[start : start + len(output)] = exchange.logprobs or [0.0] * len(output)
    for name, got, expected in (
        ("loss_mask", sample.loss_mask, mask[prompt_length:]),
        ("rollout_log_probs", sample.rollout_log_probs, logprobs[prompt_length:]),
    ):
        if got != expected:
            yield f"{name} is not what the engine sampled{_difference(got or [], expected)}"


def _wrong_sampled(answered: Sequence[Exchange], sample: Sample) -> Iterator[str]:
    response = sample.tokens[len(sample.tokens) - sample.response_length :]
    kept = zip(response, sample.loss_mask or [], sample.rollout_log_probs or [], strict=True)
    trained = [(token, logprob) for token, mask, logprob in kept if mask]
    sampled = [
        (token, logprob)
        for exchange in answered
        for token, logprob in zip(exchange.output_ids or [], exchange.logprobs, strict=True)
    ]
    if trained != sampled:
        yield f"the trained tokens are not what the engine sampled{_difference(trained, sampled)}"


def _difference(got: Sequence[Any], expected: Sequence[Any]) -> str:
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(got, expected, strict=False)))
    return f": got {len(got)} values, expected {len(expected)}; the first {same} agree"
