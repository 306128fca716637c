"""The variants with an agent: this package, its workers, gateway and sub-agents, strands-sglang, Strands' OpenAI model.

Unless a step `runs_code`, their code tool runs nothing: it looks up the output of each script's code. The tool has the
name, description and schema of the real code tool, so that prompts equal the scripts' prompts. See
`benchmarks.variants`.
"""

import asyncio
import io
import itertools
import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir
from types import SimpleNamespace
from typing import Any, ClassVar, Final

import orjson
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.hooks import (
    AfterInvocationEvent,
    AfterModelCallEvent,
    AfterToolCallEvent,
    AfterToolsEvent,
    BeforeInvocationEvent,
    BeforeModelCallEvent,
    BeforeToolCallEvent,
    BeforeToolsEvent,
    HookProvider,
    HookRegistry,
    MessageAddedEvent,
)
from strands.plugins import Plugin

from benchmarks.script import Script, load_scripts
from benchmarks.variants import WITH_IMAGES, WORKERS, Job, Played, WrongEpisodeError, sampling_params
from strands_rollout import Sample, SGLangModel, Task, generate, reward_func
from strands_rollout.code_tool.tool import CODE_TOOL_DESCRIPTION, CODE_TOOL_NAME, CODE_TOOL_SCHEMA
from strands_rollout.gateway.program import Endpoint
from strands_rollout.settings import SYSTEM_PROMPT
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.slime_plugin.workers import local_workers
from strands_rollout.template.messages import to_chat_messages, to_chat_tools

EVENTS: Final = (
    BeforeInvocationEvent,
    AfterInvocationEvent,
    MessageAddedEvent,
    BeforeModelCallEvent,
    AfterModelCallEvent,
    BeforeToolsEvent,
    AfterToolsEvent,
    BeforeToolCallEvent,
    AfterToolCallEvent,
)
_SCRIPTS_VARIABLE: Final = "STRANDS_ROLLOUT_BENCH_SCRIPTS"  # paths of the scripts, for episode workers
_RESULTS: Final[dict[str, str]] = {}


def register_results(scripts: Iterable[Script]) -> None:
    _RESULTS.update((turn.code, turn.result) for script in scripts for turn in script.turns if turn.code)


def _known_results() -> Mapping[str, str]:
    if not _RESULTS:  # in an episode worker
        for path in os.environ[_SCRIPTS_VARIABLE].split(os.pathsep):
            register_results(load_scripts(Path(path)))
    return _RESULTS


@tool(name=CODE_TOOL_NAME, description=CODE_TOOL_DESCRIPTION, inputSchema={"json": CODE_TOOL_SCHEMA})
async def answer_from_script(code: str) -> str:
    """Return the result that the scripts have for `code`; fail if no script has it."""
    return _known_results()[code]


class Listener(HookProvider):
    """A user's hook that receives every event of an agent and does nothing."""

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002 - Strands' signature
        for kind in EVENTS:
            registry.add_callback(kind, self._ignore)

    def _ignore(self, event: Any) -> None:
        pass


class ListeningPlugin(Plugin):
    """A plugin with two hooks."""

    name = "listening"

    def init_agent(self, agent: Any) -> None:
        for kind in (BeforeToolCallEvent, AfterModelCallEvent):
            agent.hooks.add_callback(kind, self._ignore)

    def _ignore(self, event: Any) -> None:
        pass


def build_agent(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, system_prompt=SYSTEM_PROMPT, tools=list(task.tools))


def build_agent_with_plugin(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, system_prompt=SYSTEM_PROMPT, tools=list(task.tools), plugins=[ListeningPlugin()])


_SETTINGS_BY_VARIANT: Final[Mapping[str, dict[str, Any]]] = {
    "ours": {},
    "ours-hook": {"hooks": [f"{__name__}.{Listener.__name__}"]},
    "ours-plugin": {"agent_factory": f"{__name__}.{build_agent_with_plugin.__name__}"},
    "ours-factory": {"agent_factory": f"{__name__}.{build_agent.__name__}"},
    "ours-journal": {"journal_dir": str(Path(gettempdir()) / "strands-rollout-journal")},
}


class Ours:
    """This package as slime calls it: `strands_rollout.generate` on samples, with limits that no script reaches."""

    def __init__(self, job: Job) -> None:
        tools = {} if job.step.runs_code else {"tools": [f"{__name__}.answer_from_script"]}
        settings = tools | _SETTINGS_BY_VARIANT.get(job.step.variant, {})
        freezes = job.collector != "unfrozen"
        self._params, self._count = sampling_params(), 0
        self._args = SimpleNamespace(
            hf_checkpoint=job.tokenizer,
            sglang_router_ip="127.0.0.1",
            sglang_router_port=job.port,
            strands_rollout={"max_tool_iterations": None, "freeze_gc": freezes, **settings},
        )

    async def play(self, script: Script) -> Played:
        return await self._play(script.question)

    async def _play(self, content: str | list[dict[str, Any]]) -> Played:
        self._count += 1
        sample = Sample(index=self._count, prompt=[{"role": "user", "content": content}], label="144")
        sample = await generate(self._args, sample, self._params)
        if sample.status is not Sample.Status.COMPLETED:
            raise WrongEpisodeError(f"the sample is {sample.status.name}: {sample.metadata}")
        return Played(sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample)

    async def close(self) -> None:
        """Do nothing: the shared client is closed with its loop."""


class OursWithImages(Ours):
    """The same episodes with an image in each prompt, scored as in slime.

    The images are files in memory, as a data set holds them.
    """

    _PIXELS: ClassVar = (448, 336)
    _COUNT: ClassVar = 32

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._images = itertools.cycle([_picture(*self._PIXELS, number) for number in range(self._COUNT)])

    async def play(self, script: Script) -> Played:
        image = {"type": "image", "image": {"bytes": next(self._images), "path": None}}
        played = await self._play([image, {"type": "text", "text": script.question}])
        reward = await reward_func(self._args, played.result)
        if not isinstance(reward, dict) or reward["score"] != 1:
            raise WrongEpisodeError(f"got the reward {reward}; expected the score 1 for the script's answer")
        return played


def _picture(width: int, height: int, number: int) -> bytes:
    """Return a PNG of a gradient; each number gives a different picture."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.radial_gradient("L").rotate(number).resize((width, height)).convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


class OursOnWorkers(Ours):
    """The driver of episode workers, on a Ray cluster on this machine that starts and ends with the player."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        count = WORKERS[job.step.variant]
        self._args.strands_rollout["episode_workers"] = count
        os.environ[_SCRIPTS_VARIABLE] = os.pathsep.join((job.scripts, job.warm_up_scripts))
        self._ray = ExitStack()
        self._ray.enter_context(local_workers(count))

    async def close(self) -> None:
        self._ray.close()


class ThroughGateway(Ours):
    """The episodes of `Ours` as agent programs on the gateway; their client runs in the scripted engine's process.

    `engine_port_and_api` is a class attribute because the program is called without the job.
    """

    engine_port_and_api: ClassVar[tuple[int, str]]

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        settings = self._args.strands_rollout
        del settings["tools"]
        settings["agent_program"] = f"{__name__}.{play_through_gateway.__name__}"
        ThroughGateway.engine_port_and_api = job.port, job.step.variant.removeprefix("gateway-")


async def play_through_gateway(task: Task, endpoint: Endpoint) -> None:
    """Ask the client in the scripted engine's process to play an episode through the gateway, as an agent program.

    Raises:
        WrongEpisodeError: The client did not play the episode.
    """
    port, api = ThroughGateway.engine_port_and_api
    body = orjson.dumps([api, endpoint.base_url, endpoint.api_key, task.text])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"POST /play HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    answer = await reader.readuntil(b"\r\n")
    writer.close()
    if b" 200 " not in answer:
        raise WrongEpisodeError(f"got {answer!r}; expected status 200 once the client has played the episode")


class SubAgents:
    """Plain Strands agents, as a tool builds them: up to 64 agents share a model object, or each has its own."""

    def __init__(self, job: Job) -> None:
        self._tokenizer, self._url = load_tokenizer(job.tokenizer), f"http://127.0.0.1:{job.port}"
        self._agents_per_model = 1 if job.step.variant == "own-model" else 64
        self._count = 0

    async def play(self, script: Script) -> Played:
        if self._count % self._agents_per_model == 0:
            params: Any = sampling_params()
            self._model = SGLangModel(self._tokenizer, self._url, conversations="many", sampling_params=params)
        self._count += 1
        model = self._model
        agent = Agent(
            model=model,
            tools=[answer_from_script],
            callback_handler=None,
            system_prompt=SYSTEM_PROMPT,
            conversation_manager=NullConversationManager(),
        )
        await agent.invoke_async(script.question)
        read = next(one for one in model.record if one.agent is agent).branch.trajectory
        mask, logprobs = read.loss_mask[read.prompt_length :], read.logprobs[read.prompt_length :]
        sample = _sample(self._tokenizer, read.token_ids, mask, logprobs)
        return Played(sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample)

    async def close(self) -> None:
        """Do nothing: the shared client is closed with its loop."""


class StrandsSGLang:
    """strands-sglang as slime's example uses it: one client for all episodes, a model, a limiter and an agent for each.

    Written from its public API (strands-sglang 0.6.2).
    """

    def __init__(self, job: Job) -> None:
        import strands_sglang
        from strands_sglang.tool_parsers import HermesToolParser

        self._library, self._parser = strands_sglang, HermesToolParser
        self._tokenizer = load_tokenizer(job.tokenizer)
        self._params = sampling_params()
        self._args = SimpleNamespace(
            sglang_router_ip="127.0.0.1",
            sglang_router_port=job.port,
            sglang_server_concurrency=1024,
            rollout_num_gpus=1,
            rollout_num_gpus_per_engine=1,
        )

    async def play(self, script: Script) -> Played:
        client = self._library.get_client_from_slime_args(self._args, timeout=300.0)
        model = self._library.SGLangModel(
            tokenizer=self._tokenizer, client=client, tool_parser=self._parser(), sampling_params=self._params
        )
        agent = Agent(
            model=model,
            tools=[answer_from_script],
            hooks=[self._library.LoopLimiter(max_tool_iters=script.tool_turns + 1)],
            callback_handler=None,
            system_prompt=SYSTEM_PROMPT,
        )
        await agent.invoke_async(script.question)
        rollout, start = model.rollout, model.rollout.initial_prompt_length
        sample = _sample(self._tokenizer, rollout.token_ids, rollout.loss_mask[start:], rollout.logprobs[start:])
        model.reset()
        agent.cleanup()
        return Played(sample.tokens, sample.loss_mask, sample.rollout_log_probs, sample)

    async def close(self) -> None:
        await self._library.get_client_from_slime_args(self._args, timeout=300.0).close()


class OpenAI:
    """Strands' own OpenAI model on the engine's chat endpoint; its messages are tokenized again after the episode.

    One `openai.AsyncOpenAI` serves all episodes, because that is the cheapest way to use the model. Tokens and mask
    come from one rendering of the whole conversation: the sampled tokens are not recorded, and there are no logprobs.
    """

    def __init__(self, job: Job) -> None:
        import openai
        from strands.models.openai import OpenAIModel

        self._model = OpenAIModel
        self._tokenizer = load_tokenizer(job.tokenizer)
        self._client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{job.port}/v1", api_key="none", max_retries=0)
        self._params = {name: sampling_params()[name] for name in ("temperature", "top_p")}
        self._head = self._encode("<|im_start|>assistant\n")
        self._end = self._encode("<|im_end|>")[0]

    async def play(self, script: Script) -> Played:
        agent = Agent(
            model=self._model(client=self._client, model_id="scripted", params=self._params),
            tools=[answer_from_script],
            callback_handler=None,
            system_prompt=SYSTEM_PROMPT,
            # the default manager drops a long conversation's first messages, but they are trained on
            conversation_manager=NullConversationManager(),
        )
        await agent.invoke_async(script.question)
        tokens, mask = self._tokens_and_mask(agent.messages)
        sample = _sample(self._tokenizer, tokens, mask)
        agent.cleanup()
        return Played(tokens, mask, None, sample)

    def _tokens_and_mask(self, messages: Any) -> tuple[list[int], list[int]]:
        """Return the conversation's tokens, and the mask of assistant tokens after the prompt."""
        chat = [{"role": "system", "content": SYSTEM_PROMPT}, *to_chat_messages(messages)]
        tools = to_chat_tools([answer_from_script.tool_spec])
        text = self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False)
        tokens, head = self._encode(str(text).rstrip("\n")), self._head
        mask = [0] * len(tokens)
        begins = (at for at, token in enumerate(tokens) if token == head[0])
        starts = [at + len(head) for at in begins if tokens[at : at + len(head)] == head]
        for start in starts:
            end = tokens.index(self._end, start) + 1
            mask[start:end] = [1] * (end - start)
        return tokens, mask[starts[0] :]

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

    async def close(self) -> None:
        await self._client.close()


def _sample(tokenizer: Any, tokens: list[int], mask: list[int], logprobs: list[float] | None = None) -> Any:
    """Return the sample that a trainer would get from a variant that makes no samples itself."""
    sample = Sample(status=Sample.Status.COMPLETED, tokens=tokens, loss_mask=mask, response_length=len(mask))
    sample.rollout_log_probs = logprobs
    sample.response = tokenizer.decode(tokens[-len(mask) :], skip_special_tokens=False)
    return sample


AGENT_VARIANTS: Final[Mapping[str, type[Ours | SubAgents | StrandsSGLang | OpenAI]]] = {
    **dict.fromkeys(_SETTINGS_BY_VARIANT, Ours),
    WITH_IMAGES: OursWithImages,
    **dict.fromkeys(WORKERS, OursOnWorkers),
    **dict.fromkeys(("gateway-chat", "gateway-responses", "gateway-messages"), ThroughGateway),
    **dict.fromkeys(("one-model", "own-model"), SubAgents),
    "strands-sglang": StrandsSGLang,
    "openai": OpenAI,
}
