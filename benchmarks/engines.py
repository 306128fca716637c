"""The engine benchmark: tokens per second, long prompts, the prefix cache, samples of one prompt.

Measures engines behind SGLang's API; the embedded engine runs in a process of its own. All engines take turns within
each round, so that other load on the machine affects them equally.
"""

import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Final, Literal

import httpx

from benchmarks.measuring import listening_process, process_tree, threads_cpu_s
from benchmarks.report import markdown
from strands_rollout.client.client import fetch_server_info
from strands_rollout.client.transport import create_client, redacted
from strands_rollout.engine import engine_process
from strands_rollout.errors import ConfigError, EngineResponseError, EngineUnavailableError

SGLANG_VENV: Final = "STRANDS_ROLLOUT_SGLANG_VENV"
_SGLANG_SCRIPT: Final = Path(__file__).resolve().parents[1] / "scripts" / "sglang_cpu.sh"
# SGLang reserves six tokens of a context, one token is generated, and one is spare.
_CONTEXT_RESERVE: Final = 8
# Prompts consist of ids below this number; the vocabularies of all measured engines must have these ids.
_MAX_ID: Final = 1000
# SGLang refuses to flush for a moment after its last answer.
_FLUSH_ATTEMPTS: Final = 100
_FLUSH_PAUSE_S: Final = 0.05
_LOCAL_HOSTS: Final = ("127.0.0.1", "localhost")

Kind = Literal["decode", "prefill", "samples"]
Cache = Literal["distinct", "flushed", "again", "shared"]
OnStep = Callable[[int, int], None]
"""Function that receives the number of finished passes and of all passes."""
_CACHES: Final[tuple[Cache, ...]] = ("distinct", "flushed", "again")
_CACHE_LABELS: Final = {
    "distinct": "prompts never seen",
    "flushed": "cache just emptied",
    "again": "same prompts again",
    "shared": "one prompt for all",
}


@dataclass(frozen=True, slots=True)
class Workload:
    """Concurrent requests, each with a prompt of `prompt_tokens` tokens and for exactly `new_tokens` new tokens.

    `cache` is the content of the engine's prefix cache before the requests: "distinct": other prompts; "flushed":
    nothing; "again": the prompts of the requests; "shared": nothing, and all requests have the same prompt.
    """

    kind: Kind
    cache: Cache
    requests: int
    prompt_tokens: int
    new_tokens: int

    @property
    def counted_tokens(self) -> int:
        """Number of tokens that the rate counts: the prompt tokens for "prefill", else the new tokens."""
        return self.requests * (self.prompt_tokens if self.kind == "prefill" else self.new_tokens)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a workload, from the first request to the last answer.

    `engine_cpu_s` is the CPU time of the engine's processes, user and system; None if it is not visible.
    `cached_tokens` is the number of prompt tokens that the engine found in its cache, over all requests.
    """

    wall_s: float
    engine_cpu_s: float | None
    cached_tokens: int


async def run_workload(http: httpx.AsyncClient, work: Workload, seed: int) -> Cost:
    """Send a workload, and return its cost when the last answer has arrived; equal seeds give equal prompts.

    Raises:
        EngineUnavailableError: The engine does not answer, answers with an error, or does not empty its cache.
        EngineResponseError: An answer does not have the requested number of tokens.
    """
    bodies = _request_bodies(work, seed)
    if work.cache != "distinct":
        await flush(http)
    if work.cache == "again":
        await _send_all(http, bodies)
    processes = engine_processes(http.base_url)
    cpu_before, started = threads_cpu_s(processes), time.perf_counter()
    answers = await _send_all(http, bodies)
    wall_s, cpu_after = time.perf_counter() - started, threads_cpu_s(processes)
    return Cost(
        wall_s=wall_s,
        engine_cpu_s=None if cpu_before is None or cpu_after is None else cpu_after - cpu_before,
        cached_tokens=sum(_cached_tokens(answer, work) for answer in answers),
    )


async def flush(http: httpx.AsyncClient) -> None:
    """Empty the engine's prefix cache.

    Raises:
        EngineUnavailableError: The engine does not answer, or refuses for several seconds, for example because others
            use it.
    """
    for _ in range(_FLUSH_ATTEMPTS):
        if (await _post(http, "/flush_cache", b"{}")).status_code == httpx.codes.OK:
            return
        await asyncio.sleep(_FLUSH_PAUSE_S)
    raise EngineUnavailableError(f"{http.base_url} refuses to empty its cache; check that nobody else uses this engine")


def _request_bodies(work: Workload, seed: int) -> list[bytes]:
    numbers = random.Random(seed)
    prompts = [numbers.choices(range(_MAX_ID), k=work.prompt_tokens) for _ in range(work.requests)]
    if work.cache == "shared":
        prompts = prompts[:1] * work.requests
    params = {"max_new_tokens": work.new_tokens, "ignore_eos": True, "temperature": 1.0}
    common = {"sampling_params": params, "return_logprob": True}
    return [json.dumps({"input_ids": prompt, **common}).encode() for prompt in prompts]


async def _send_all(http: httpx.AsyncClient, bodies: list[bytes]) -> list[httpx.Response]:
    return await asyncio.gather(*(_post(http, "/generate", body) for body in bodies))


async def _post(http: httpx.AsyncClient, path: str, body: bytes) -> httpx.Response:
    try:
        return await http.post(path, content=body, headers={"Content-Type": "application/json"})
    except httpx.TransportError as e:
        raise EngineUnavailableError(f"no answer from {http.base_url}{path}: {e!r}; check that it is up") from e


def _cached_tokens(answer: httpx.Response, work: Workload) -> int:
    if answer.status_code != httpx.codes.OK:
        raise EngineUnavailableError(f"{answer.url} answered {answer.status_code} {answer.text[:200]}; expected 200")
    meta = answer.json()["meta_info"]
    if meta["completion_tokens"] != work.new_tokens:
        raise EngineResponseError(
            f"{answer.url} generated {meta['completion_tokens']} tokens; expected {work.new_tokens}, as ignore_eos asks"
        )
    return int(meta["cached_tokens"])


def engine_processes(url: httpx.URL) -> list[int]:
    """Return the engine's processes on this machine: the oldest that listens on the URL's port, and its descendants.

    The list is empty if the URL names another host, or if no such process is visible.
    """
    root = listening_process(url.port or 80) if url.host in _LOCAL_HOSTS else None
    return [] if root is None else process_tree(root)


@dataclass(frozen=True, slots=True)
class EngineRow:
    """The cost of a workload on an engine: medians over the rounds.

    `cpu_us_per_token` is the CPU time of the engine's processes in microseconds; None if it is not visible. Both rates
    count new tokens, or prompt tokens for "prefill".
    """

    engine: str
    workload: Workload
    wall_s: float
    tokens_per_s: float
    cpu_us_per_token: float | None
    cached_tokens: float


def engine_row(engine: str, workload: Workload, passes: Sequence[Cost]) -> EngineRow:
    """Return the medians over the passes; there must be at least one pass."""
    wall_s = median(took.wall_s for took in passes)
    cpus = [took.engine_cpu_s for took in passes if took.engine_cpu_s is not None]
    return EngineRow(
        engine=engine,
        workload=workload,
        wall_s=wall_s,
        tokens_per_s=workload.counted_tokens / wall_s,
        cpu_us_per_token=median(cpus) / workload.counted_tokens * 1e6 if cpus else None,
        cached_tokens=median(took.cached_tokens for took in passes),
    )


def rows_as_json(rows: Sequence[EngineRow]) -> str:
    """Return a JSON list with an object per row, with `EngineRow`'s names and the workload as an object."""
    return json.dumps([asdict(row) for row in rows])


def rows_as_markdown(rows: Sequence[EngineRow]) -> str:
    """Return a table with a line per workload and, for each engine, tokens/s, wall ms and CPU per token."""
    engines = list(dict.fromkeys(row.engine for row in rows))
    found = {(row.workload, row.engine): row for row in rows}
    heads = [head for engine in engines for head in (f"{engine}: tokens/s", "ms", "CPU us/token")]
    lines = [
        [
            f"{_describe_workload(workload)}; {_CACHE_LABELS[workload.cache]}",
            *(cell for engine in engines for cell in _row_cells(found.get((workload, engine)))),
        ]
        for workload in dict.fromkeys(row.workload for row in rows)
    ]
    return markdown(["measured; cache", *heads], lines)


def _describe_workload(work: Workload) -> str:
    if work.kind == "prefill":
        return f"prefill of {work.prompt_tokens:,} tokens"
    requests = "1 request" if work.requests == 1 else f"{work.requests} requests"
    return f"{work.kind}: {requests}, {work.prompt_tokens:,} + {work.new_tokens:,} tokens"


def _row_cells(row: EngineRow | None) -> list[str]:
    if row is None:
        return [""] * 3
    cpu = "" if row.cpu_us_per_token is None else f"{row.cpu_us_per_token:,.0f}"
    return [f"{row.tokens_per_s:,.0f}", f"{1000 * row.wall_s:,.0f}", cpu]


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """Sizes of the measurements.

    Attributes:
        concurrencies: Numbers of concurrent requests to measure decoding with.
        decode_prompt_tokens: Tokens of each prompt when decoding is measured; each answer has `decode_new_tokens`.
        prefill_tokens: Prompt lengths to measure prefill with, if they fit into the context; the longest prompt that
            fits is measured too.
        samples: Number of concurrent requests with prompts of `sample_prompt_tokens` and answers of
            `sample_new_tokens`; measured once with the same prompt in all requests, and once with different prompts.
        rounds: Number of measured rounds of all workloads on all engines, after `warmup_rounds`.
    """

    concurrencies: tuple[int, ...] = (1, 8, 32)
    decode_prompt_tokens: int = 100
    decode_new_tokens: int = 200
    prefill_tokens: tuple[int, ...] = (512, 2048)
    samples: int = 8
    sample_prompt_tokens: int = 1000
    sample_new_tokens: int = 32
    rounds: int = 5
    warmup_rounds: int = 1

    def workloads(self, context_length: int) -> list[Workload]:
        """Return the workloads that fit into the engines' shortest context, which has `context_length` tokens."""
        longest = context_length - _CONTEXT_RESERVE
        lengths = sorted({*(tokens for tokens in self.prefill_tokens if tokens < longest), longest})
        prompt, new = self.decode_prompt_tokens, self.decode_new_tokens
        work = [Workload("decode", "distinct", count, prompt, new) for count in self.concurrencies]
        work += [Workload("prefill", cache, 1, tokens, 1) for tokens in lengths for cache in _CACHES]
        shared: tuple[Cache, ...] = ("shared", "flushed")
        prompt, new = self.sample_prompt_tokens, self.sample_new_tokens
        work += [Workload("samples", cache, self.samples, prompt, new) for cache in shared]
        return [one for one in work if one.prompt_tokens + one.new_tokens < context_length]


@dataclass(frozen=True, slots=True)
class ComparedEngines:
    """Engines to compare: the URLs of running engines by name, and engines to start.

    Nobody else may use the running engines during the benchmark.
    SGLang is started on this CPU with `scripts/sglang_cpu.sh`; see `has_sglang`.
    """

    urls: Mapping[str, str] = field(default_factory=dict)
    embedded: bool = True
    sglang: bool = False


def run_engine_benchmark(
    plan: EngineBenchmark, engines: ComparedEngines, *, on_step: OnStep | None = None
) -> list[EngineRow]:
    """Measure the engines in turn; return a row for each workload and engine.

    Raises:
        ConfigError: There is no engine to measure, or a URL is wrong.
        EngineUnavailableError: An engine does not start, answer or empty its cache.
        EngineResponseError: An engine's answer does not have the requested number of tokens.
    """
    return asyncio.run(_run(plan, engines, on_step or (lambda *_: None)))


def has_sglang() -> bool:
    """Return whether `SGLANG_VENV` is set in the environment, and this checkout has the script that starts SGLang."""
    return bool(os.environ.get(SGLANG_VENV)) and _SGLANG_SCRIPT.is_file()


async def _run(plan: EngineBenchmark, engines: ComparedEngines, on_step: OnStep) -> list[EngineRow]:
    urls = dict(engines.urls)
    async with AsyncExitStack() as stack:
        if engines.embedded:
            urls = {"embedded": await stack.enter_async_context(engine_process()), **urls}
        if engines.sglang:
            urls["SGLang"] = await stack.enter_async_context(_sglang_url())
        if not urls:
            raise ConfigError("there is no engine to measure; pass `urls`, `embedded=True` or `sglang=True`")
        clients = {name: create_client(url) for name, url in urls.items()}
        for client in clients.values():
            stack.push_async_callback(client.aclose)
        work = plan.workloads(min([await _context_length(client) for client in clients.values()]))
        passes = await _measure(clients, work, plan, on_step)
    return [engine_row(name, one, took) for (one, name), took in passes.items()]


async def _measure(
    clients: Mapping[str, httpx.AsyncClient], work: Sequence[Workload], plan: EngineBenchmark, on_step: OnStep
) -> dict[tuple[Workload, str], list[Cost]]:
    took: dict[tuple[Workload, str], list[Cost]] = {(one, name): [] for one in work for name in clients}
    rounds = plan.warmup_rounds + plan.rounds
    for client in clients.values():
        await flush(client)
    done = 0
    for index in range(rounds):
        for number, one in enumerate(work):
            for name, client in clients.items():
                result = await run_workload(client, one, seed=index * len(work) + number)
                if index >= plan.warmup_rounds:
                    took[one, name].append(result)
                done += 1
                on_step(done, rounds * len(took))
    return took


async def _context_length(client: httpx.AsyncClient) -> int:
    url = redacted(client.base_url)
    length = (await fetch_server_info(client, url=url)).context_length
    if length is None:
        raise EngineUnavailableError(f"{url} reports no context length; expected an SGLang server, not a router")
    return length


@asynccontextmanager
async def _sglang_url() -> AsyncIterator[str]:
    """Run SGLang on this CPU until the block ends; yield its URL."""
    started = json.loads(await _script_output("start", "--owner", str(os.getpid())))
    try:
        yield started["base_url"]
    finally:
        await _script_output("stop", str(started["pid"]))


async def _script_output(*arguments: str) -> bytes:
    script = await asyncio.create_subprocess_exec(
        "bash", str(_SGLANG_SCRIPT), *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await script.communicate()
    if script.returncode != 0:
        raise EngineUnavailableError(
            f"{_SGLANG_SCRIPT.name} {arguments[0]} ended with exit code {script.returncode}; its message is above"
        )
    return output
