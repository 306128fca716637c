"""The doctor: all checks of one machine, in their order, and those of the servers that it is asked about."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import httpx
import orjson

from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.diagnostics import diagnosis, machine, run_files, slime_episode
from strands_rollout.diagnostics.diagnosis import Check, Finding, Question, error, good, skipped, warning
from strands_rollout.errors import ConfigError, EngineUnavailableError, foreign_code
from strands_rollout.files import Json

_SERVER_S: Final = 15.0
_CONNECT_S: Final = 3.0
_READ_S: Final = 5.0
_OLDEST: Final = (0, 5)
_START: Final = "start it, and check host and port: python -m sglang.launch_server --model-path MODEL --port 30000"
_UNREACHABLE: Final = (httpx.TransportError, aiohttp.ClientError, EngineUnavailableError)
# words, numbers and control tokens that vocabularies cut in different ways
_TEXT: Final = "<|im_start|>Zwölf Boxkämpfer: x = 1234567, \\boxed{42}; unbelievably<tool_call>\n\n\t東京<|im_end|>"
_CHECKS: Final = (
    Check("packages", machine.check_packages),
    Check("slime", slime_episode.check_slime, waits=True),
    Check("slime episode", slime_episode.check_slime_episode, waits=True),
    Check("megatron", slime_episode.check_megatron, waits=True),
    Check("gpus", machine.check_gpus, waits=True),
    Check("limits", machine.check_limits, waits=True),
    Check("proxies", machine.check_proxies),
    Check("disk", machine.check_disk, waits=True),
    Check("ray", machine.check_ray, waits=True),
    Check("wandb", machine.check_wandb),
    Check("model", run_files.check_model),
    Check("converted model", run_files.check_converted_model),
    Check("tokenizer", run_files.check_tokenizer),
    Check("config", run_files.check_config),
    Check("data", run_files.check_data),
    Check("sandbox", machine.check_sandbox, waits=True),
)


def examine(question: Question) -> diagnosis.Diagnosis:
    """Check this machine; takes seconds, and leaves nothing behind."""
    servers = [Check("server", partial(check_server, url), waits=True) for url in question.base_urls or ()]
    no_server = Check("server", lambda _: [skipped("server", "no --base-url: no SGLang was asked")])
    return diagnosis.Diagnosis(diagnosis.run_checks([*_CHECKS, *(servers or [no_server])], question))


def check_server(base_url: str, question: Question, limit_s: float = _SERVER_S) -> list[Finding]:
    """Whether SGLang, or a router before it, answers, with the tokens and the context that the question names."""
    try:
        shown = redacted(parse_base_url(base_url))
    except ConfigError as e:
        return [error("server", str(e), "name it as http://127.0.0.1:30000")]

    async def within_limit() -> list[Finding]:
        async with asyncio.timeout(limit_s):
            return await _ask(base_url, shown, question)

    try:
        return asyncio.run(within_limit())
    except TimeoutError:
        return [error("server", f"{shown} did not answer within {limit_s:g} s", f"look at its log, or {_START}")]


async def _ask(base_url: str, shown: str, question: Question, *, is_worker: bool = False) -> list[Finding]:
    async with create_client(base_url, connect_timeout=_CONNECT_S, timeout=_READ_S) as http:
        try:
            health = await http.get("/health")
            if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                found = f"{shown} is up, but not healthy (503): it is loading, or its scheduler hangs"
                return [error("server", found, "wait until it has loaded, look at its log, or start it again")]
            workers = None if is_worker else _object(await http.get("/workers")).get("workers")
            if isinstance(workers, list):
                return await _ask_router([one for one in workers if isinstance(one, dict)], shown, question)
            info = await fetch_server_info(http, url=shown)
            if info.model_path is None:
                name = health.headers.get("server", "a server that does not name itself")
                found = f"{shown} answers, but is not SGLang: {name}; its /server_info names no model"
                return [error("server", found, f"check the port; another server may have it. {_START}")]
            context = _context(info, shown, question.max_context_length)
            return [_engine(info, shown), context, await _tokens(http, info, question)]
        except _UNREACHABLE as e:
            return [error("server", f"nothing answers at {shown}: {e or type(e).__name__}", _START)]


async def _ask_router(workers: list[dict[str, Json]], shown: str, question: Question) -> list[Finding]:
    urls = [str(worker["url"]) for worker in workers if worker.get("is_healthy", True) and worker.get("url")]
    if not urls:
        found = f"the router at {shown} has {len(workers)} workers, none of them healthy"
        return [error("server", found, "start an SGLang server and register it: POST /workers with its url")]
    router = good("server", f"a router at {shown} with {len(urls)} of {len(workers)} workers healthy")
    behind = f"{redacted(parse_base_url(urls[0]))} (behind the router)"
    return [router, *await _ask(urls[0], behind, question, is_worker=True)]


def _object(response: httpx.Response) -> dict[str, Json]:
    """The object that a server answers with; empty where it is none."""
    try:
        answer = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
    except orjson.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}


def _engine(info: ServerInfo, shown: str) -> Finding:
    version = info.raw.get("version")
    name = f"SGLang {version}" if version else "a server with SGLang's API, of unknown version,"
    found = f"{name} at {shown}: {info.model_path}, weights {info.weight_version}"
    numbers = tuple(int(part) for part in str(version or "").split(".")[:2] if part.isdecimal())
    if numbers and numbers < _OLDEST:
        return warning("server", f"{found}; too old", "pip install 'sglang>=0.5'")
    return good("server", found)


def _context(info: ServerInfo, shown: str, wanted: int | None) -> Finding:
    name, length = "server context", info.context_length
    known = f"{shown} takes {length} tokens" if length else f"{shown} does not state its context length"
    if wanted is None:
        return skipped(name, f"{known}; no --max-context-length to compare with")
    if length is None:
        return warning(name, f"{known}; {wanted} tokens are wanted", f"start it with --context-length {wanted}")
    if length < wanted:
        found = f"{known}, {wanted} are wanted: longer episodes are cut or refused"
        remedy = f"start it with --context-length {wanted}, or lower slime's --rollout-max-context-len to {length}"
        return warning(name, found, remedy)
    return good(name, f"{known}, {wanted} are wanted")


async def _tokens(http: httpx.AsyncClient, info: ServerInfo, question: Question) -> Finding:
    """Whether a server cuts text into the same tokens as the run's tokenizer: other ids at a server can kill it.

    Asks SGLang's /tokenize (0.5.23), which routers and older servers lack; there, the server's own folder is read if it
    is on this machine.
    """
    name, folder = "server tokens", question.tokenizer_dir
    is_known = question.tokenizer is not None or folder != diagnosis.SHIPPED_TOKENIZER
    own = _ids_of(folder) if is_known else None
    if own is None:
        return skipped(name, "no --tokenizer to compare with the server's")
    model = info.raw.get("served_model_name") or info.model_path
    asked = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    served = _object(await http.post("/tokenize", json=asked)).get("tokens")
    if not isinstance(served, list):
        served = _ids_of(Path(str(info.raw.get("tokenizer_path") or info.model_path)))
    if served is None:
        return skipped(name, "the server has no /tokenize, and its tokenizer is not on this machine")
    if served == own:
        return good(name, f"a text has the same {len(own)} tokens there as in {folder}")
    found = (
        f"the tokenizer {folder} is not that of the served {info.model_path}: a text is {len(own)} tokens "
        f"here, {own[:6]}..., and {len(served)} there, {served[:6]}..."
    )
    remedy = "name the folder of the served model with --tokenizer, or serve the model that is trained"
    return (warning if question.tokenizer is None else error)(name, found, remedy)


def _ids_of(folder: Path) -> list[int] | None:
    """The text's ids by the tokenizer of a folder; None where there is none that works."""
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    with foreign_code("tokenizers raises plain Exceptions; a broken file is another check's finding"):
        return list(Tokenizer.from_file(str(file)).encode(_TEXT, add_special_tokens=False).ids)
    return None
