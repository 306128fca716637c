"""Compares engines behind SGLang's API: tokens per second, long prompts, the prefix cache, samples of one prompt.

The embedded engine runs in a process of its own. All engines take turns within each round, so that what else the
machine does hits them alike.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import httpx

from strands_rollout.bench.engine_table import EngineRow, engine_row
from strands_rollout.bench.engine_workloads import Cache, Took, Workload, flush, run_workload
from strands_rollout.engine_process import engine_process
from strands_rollout.errors import ConfigError, EngineUnavailableError
from strands_rollout.server_info import fetch_server_info
from strands_rollout.sglang_connection import create_client, redacted

SGLANG_VENV: Final = "STRANDS_ROLLOUT_SGLANG_VENV"
_SGLANG_SCRIPT: Final = Path(__file__).resolve().parents[2] / "scripts" / "sglang_cpu.sh"
# SGLang keeps six tokens of a prompt's room for itself, and a token is generated.
_CONTEXT_RESERVE: Final = 8
_CACHES: Final[tuple[Cache, ...]] = ("distinct", "flushed", "again")

OnStep = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """What to measure.

    Attributes:
        concurrencies: Requests at once, for decoding.
        decode_prompt_tokens: Of each prompt there; `decode_new_tokens` follow.
        prefill_tokens: Lengths of long prompts; one more is as long as the context allows. Longer ones are left out.
        samples: Of one prompt of `sample_prompt_tokens`, at once; each gets `sample_new_tokens`.
        rounds: Passes of all workloads on all engines that count; `warmup_rounds` before them don't.

    Raises:
        ConfigError: A number is not positive.
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

    def __post_init__(self) -> None:
        for name in ("decode_prompt_tokens", "decode_new_tokens", "samples", "sample_new_tokens", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; expected at least 1")
        if min((*self.concurrencies, *self.prefill_tokens, self.sample_prompt_tokens), default=1) < 1:
            raise ConfigError("expected concurrencies and prompt lengths of at least 1")
        if self.warmup_rounds < 0:
            raise ConfigError(f"warmup_rounds is {self.warmup_rounds}; expected 0 or more")

    def workloads(self, context_length: int) -> list[Workload]:
        """The workloads for engines whose shortest context has so many tokens."""
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
    """Which engines to measure.

    Attributes:
        urls: Name -> base URL of engines that are up; nobody else may use them meanwhile.
        embedded: Start the embedded engine too, as "embedded".
        sglang: Start SGLang on this CPU too, as "SGLang", with `scripts/sglang_cpu.sh`; see `has_sglang`.
        model_dir: What started engines serve; None for the shipped model.
    """

    urls: Mapping[str, str] = field(default_factory=dict)
    embedded: bool = True
    sglang: bool = False
    model_dir: Path | None = None


def run_engine_benchmark(
    plan: EngineBenchmark, engines: ComparedEngines, *, on_step: OnStep | None = None
) -> list[EngineRow]:
    """Measure engines beside each other.

    Args:
        plan: What to measure.
        engines: On what.
        on_step: Called with the passes that are done and those there are.

    Returns:
        A row for each workload and engine.

    Raises:
        ConfigError: There is no engine to measure, or a URL is wrong.
        EngineUnavailableError: An engine does not start, answer or empty its cache.
        EngineResponseError: An engine's answer has not the tokens that were asked for.
    """
    return asyncio.run(_run(plan, engines, on_step or _ignore))


def has_sglang() -> bool:
    """Whether the environment names an installed SGLang and this is a checkout, with the script that starts it."""
    return bool(os.environ.get(SGLANG_VENV)) and _SGLANG_SCRIPT.is_file()


async def _run(plan: EngineBenchmark, engines: ComparedEngines, on_step: OnStep) -> list[EngineRow]:
    urls = dict(engines.urls)
    async with AsyncExitStack() as stack:
        if engines.embedded:
            urls = {"embedded": await stack.enter_async_context(engine_process(engines.model_dir)), **urls}
        if engines.sglang:
            urls["SGLang"] = await stack.enter_async_context(_sglang(engines.model_dir))
        if not urls:
            raise ConfigError("no engine to measure; give a URL, or let one be started")
        clients = {name: create_client(url) for name, url in urls.items()}
        for client in clients.values():
            stack.push_async_callback(client.aclose)
        work = plan.workloads(min([await _context_length(client) for client in clients.values()]))
        passes = await _measure(clients, work, plan, on_step)
    return [engine_row(name, one, took) for (one, name), took in passes.items()]


async def _measure(
    clients: Mapping[str, httpx.AsyncClient], work: Sequence[Workload], plan: EngineBenchmark, on_step: OnStep
) -> dict[tuple[Workload, str], list[Took]]:
    took: dict[tuple[Workload, str], list[Took]] = {(one, name): [] for one in work for name in clients}
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
        raise EngineUnavailableError(f"{url} does not tell its context length; expected an SGLang server, not a router")
    return length


@asynccontextmanager
async def _sglang(model_dir: Path | None) -> AsyncIterator[str]:
    """SGLang on this CPU, for as long as the block lasts; yields its URL."""
    model = [] if model_dir is None else ["--model", str(model_dir)]
    started = json.loads(await _script_output("start", "--owner", str(os.getpid()), *model))
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


def _ignore(done: int, passes: int) -> None:
    del done, passes
