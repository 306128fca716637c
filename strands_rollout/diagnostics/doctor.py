"""The doctor: all checks of one machine, in their order, and those of the servers that it is asked about."""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
import httpx
import orjson

from strands_rollout.client.client import ServerInfo, fetch_server_info
from strands_rollout.client.transport import create_client, parse_base_url, redacted
from strands_rollout.diagnostics import diagnosis, machine, run_files
from strands_rollout.diagnostics.diagnosis import Check, Finding, Question, error, good, skipped, warning
from strands_rollout.diagnostics.slime_episode import check_megatron, check_slime, check_slime_episode
from strands_rollout.errors import ConfigError, EngineUnavailableError, foreign_code
from strands_rollout.files import Json

SERVER_LIMIT_S: Final = 15.0
_CONNECT_S: Final = 3.0
_READ_S: Final = 5.0
_OLDEST: Final = (0, 5)
_START: Final = "start it, and check host and port: python -m sglang.launch_server --model-path MODEL --port 30000"
_UNREACHABLE: Final = (httpx.TransportError, aiohttp.ClientError, EngineUnavailableError)
# words, numbers and control tokens that vocabularies cut in different ways
_TEXT: Final = "<|im_start|>Zwölf Boxkämpfer: x = 1234567, \\boxed{42}; unbelievably<tool_call>\n\n\t東京<|im_end|>"


def examine(question: Question) -> diagnosis.Diagnosis:
    """Look at this machine; takes seconds, and leaves nothing behind."""
    env = question.env
    servers = [Check("server", partial(check_server, url, question), waits=True) for url in question.base_urls]
    checks = [
        Check("python", machine.check_python),
        Check("packages", machine.check_packages),
        Check("slime", partial(check_slime, question), waits=True),
        Check("slime episode", partial(check_slime_episode, question), waits=True),
        Check("megatron", partial(check_megatron, question), waits=True),
        Check("gpus", partial(machine.check_gpus, question), waits=True),
        Check("memory", machine.check_memory),
        Check("open files", machine.check_open_files),
        Check("proxies", partial(machine.check_proxies, env)),
        Check("disk", lambda: machine.check_disk(machine.places_of(question)), waits=True),
        Check("shared memory", machine.check_shared_memory, waits=True),
        Check("ray", partial(machine.check_ray, env, training=question.training), waits=True),
        Check("wandb", partial(machine.check_wandb, env)),
        Check("model", partial(run_files.check_model, question)),
        Check("converted model", partial(run_files.check_converted_model, question)),
        Check("tokenizer", partial(run_files.check_tokenizer, question)),
        Check("config", partial(run_files.check_config, question)),
        Check("data", partial(run_files.check_data, question)),
        Check("sandbox", partial(machine.check_sandbox, question.isolation), waits=True),
        *(servers or [Check("server", lambda: [skipped("server", "no --base-url: no SGLang was asked")])]),
    ]
    return diagnosis.Diagnosis(tuple(diagnosis.run_checks(checks)))


def check_server(base_url: str, question: Question, limit_s: float = SERVER_LIMIT_S) -> list[Finding]:
    """What answers at the URL of a server or router, within `limit_s` seconds.

    Is it SGLang, or a router before it, with the tokens and the context that the question names?
    """
    try:
        shown = redacted(parse_base_url(base_url))
    except ConfigError as e:
        return [error("server", str(e), "name it as http://127.0.0.1:30000")]

    async def within_limit() -> list[Finding]:
        async with asyncio.timeout(limit_s):
            return await _ask(base_url, shown, question, may_be_router=True)

    try:
        return asyncio.run(within_limit())
    except TimeoutError:
        return [error("server", f"{shown} did not answer within {limit_s:g} s", f"look at its log, or {_START}")]


async def _ask(base_url: str, shown: str, question: Question, *, may_be_router: bool) -> list[Finding]:
    async with create_client(base_url, connect_timeout=_CONNECT_S, timeout=_READ_S) as http:
        try:
            health = await http.get("/health")
            if health.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                found = f"{shown} is up, but not healthy (503): it is loading, or its scheduler hangs"
                return [error("server", found, "wait until it has loaded, look at its log, or start it again")]
            workers = (_answer(await http.get("/workers"))).get("workers") if may_be_router else None
            if isinstance(workers, list):
                return await _ask_router([one for one in workers if isinstance(one, dict)], shown, question)
            info = await fetch_server_info(http, url=shown)
            if info.model_path is None:
                status = (await http.get("/server_info")).status_code
                name = health.headers.get("server", "a server that does not tell its name")
                found = f"{shown} answers, but is not SGLang: {name}; /server_info gives {status} and no model"
                return [error("server", found, f"check the port; another server may have it. {_START}")]
            return [_engine(info, shown), _context(info, shown, question), await _tokens(http, info, question)]
        except _UNREACHABLE as e:
            return [error("server", f"nothing answers at {shown}: {e or type(e).__name__}", _START)]


def _answer(response: httpx.Response) -> dict[str, Json]:
    """The object that a server answers with; empty where it is none."""
    with contextlib.suppress(orjson.JSONDecodeError):
        answer = orjson.loads(response.content) if response.status_code == httpx.codes.OK else None
        return answer if isinstance(answer, dict) else {}
    return {}


async def _ask_router(workers: list[dict[str, Json]], shown: str, question: Question) -> list[Finding]:
    healthy = [worker for worker in workers if worker.get("is_healthy", True) and worker.get("url")]
    if not healthy:
        found = f"the router at {shown} has {len(workers)} workers, none of them healthy"
        return [error("server", found, "start an SGLang server and register it: POST /workers with its url")]
    router = good("server", f"a router at {shown} with {len(healthy)} of {len(workers)} workers healthy")
    url = str(healthy[0]["url"])
    behind = f"{redacted(parse_base_url(url))} (behind the router)"
    return [router, *await _ask(url, behind, question, may_be_router=False)]


def _engine(info: ServerInfo, shown: str) -> Finding:
    version = info.raw.get("version")
    name = f"SGLang {version}" if version else "a server with SGLang's API, of unknown version,"
    found = f"{name} at {shown}: {info.model_path}, weights {info.weight_version}"
    numbers = tuple(int(part) for part in str(version or "").split(".")[:2] if part.isdecimal())
    if numbers and numbers < _OLDEST:
        return warning("server", f"{found}; too old", "pip install 'sglang>=0.5'")
    return good("server", found)


def _context(info: ServerInfo, shown: str, question: Question) -> Finding:
    wanted, length = question.max_context_length, info.context_length
    if wanted is None:
        known = f"{length} tokens" if length else "the server does not say"
        return skipped("server context", f"{known}; no --max-context-length to compare with")
    if length is None:
        found = f"{shown} does not tell its context length; {wanted} tokens are wanted"
        return warning("server context", found, f"start it with --context-length {wanted}")
    if length < wanted:
        found = f"{shown} takes {length} tokens, {wanted} are wanted: longer episodes are cut or refused"
        remedy = f"start it with --context-length {wanted}, or lower slime's --rollout-max-context-len to {length}"
        return warning("server context", found, remedy)
    return good("server context", f"{length} tokens, {wanted} are wanted")


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
    served = (_answer(await http.post("/tokenize", json=asked))).get("tokens")
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
    with foreign_code("tokenizers raises plain Exceptions; a broken file is another check's to tell"):
        return list(Tokenizer.from_file(str(file)).encode(_TEXT, add_special_tokens=False).ids)
    return None
