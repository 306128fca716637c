"""The command `try`: one row played through `generate` and `reward_func`, and its transcript as it goes.

Start at `run_try`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import sys
import textwrap
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text
from strands import Agent
from strands.hooks import AfterToolCallEvent, BeforeModelCallEvent, HookProvider, HookRegistry, MessageAddedEvent

from strands_rollout.agent.environment import place_in_users_code
from strands_rollout.client.transport import parse_base_url, redacted
from strands_rollout.dump.terminal import make_console, print_transcript
from strands_rollout.errors import ConfigError, PolicyEndedError
from strands_rollout.evaluation.evaluate import Outcome, playing, served_engine, served_tokenizer, start_executor
from strands_rollout.evaluation.options import SHIPPED_MODEL, TryOptions, slime_sampling_params
from strands_rollout.evaluation.plan import load_settings, shipped_model_note
from strands_rollout.evaluation.policies import Asked, ChatApi, Person, Script, WrittenPolicy, counted, served_policy
from strands_rollout.evaluation.rows import Row, load_rows, shipped_rows
from strands_rollout.files import Json
from strands_rollout.samples import Sample
from strands_rollout.settings import CODE_TOOL_PATH, RolloutSettings
from strands_rollout.slime_plugin.slime_adapter import load_tokenizer
from strands_rollout.template.chat_template import ChatTemplate
from strands_rollout.template.messages import system_text, to_chat_messages, to_chat_tools, tool_result_text

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_INTERRUPTED: Final = 130
_GUTTER: Final = 7
_MOST_NEW_TOKENS: Final = 16384
_MOST_NEW_TOKENS_EMBEDDED: Final = 1024
_STYLES: Final = {"policy": "bold green", "call": "green", "result": "cyan", "error": "red", "thinks": "dim green"}


class Transcript(HookProvider):
    """Prints what the main agent reads and says, as it goes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._is_begun = False
        self._asked: Asked | None = None
        self._places: dict[str, str] = {}  # where tools raised, by the id of the call

    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:  # noqa: ARG002, ANN401 - Strands' signature
        """Called by Strands."""
        registry.add_callback(MessageAddedEvent, self._message_added)
        registry.add_callback(BeforeModelCallEvent, self._before_model_call)
        registry.add_callback(AfterToolCallEvent, self._after_tool_call)

    def take_asked(self) -> Asked | None:
        """What the agent asks now, once."""
        asked, self._asked = self._asked, None
        return asked

    def show_beside(self, label: str, text: str) -> None:
        """Show what another agent reads or says, as its tokens have it."""
        self.show(label, f"(another agent)\n{text}")

    def show(self, label: str, text: str, style: str = "") -> None:
        """Print a text with its label before it."""
        width = self._console.width - _GUTTER - 3 if self._console.is_terminal else 0
        lines = [part for line in text.strip("\n").split("\n") for part in _wrapped(line, width)]
        for number, line in enumerate(lines):
            head = (f"{label if number == 0 else '':>{_GUTTER}} | ", "dim")
            self._console.print(Text.assemble(head, (line, style or _STYLES.get(label, ""))), soft_wrap=True)

    def _before_model_call(self, event: BeforeModelCallEvent) -> None:
        agent = event.agent
        system = system_text(agent.system_prompt, agent.system_prompt_content)
        head: list[Json] = [{"role": "system", "content": system}] if system else []
        specs = agent.tool_registry.get_all_tool_specs()
        self._asked = Asked([*head, *to_chat_messages(agent.messages)], to_chat_tools(specs))

    def _after_tool_call(self, event: AfterToolCallEvent) -> None:
        if event.exception is not None:
            self._places[event.tool_use["toolUseId"]] = place_in_users_code(event.exception)

    def _message_added(self, event: MessageAddedEvent) -> None:
        if not self._is_begun:
            self._is_begun = True
            self._show_agent(event.agent)
            for message in event.agent.messages[:-1]:
                self._show_message(message)
        self._show_message(event.message)

    def _show_agent(self, agent: Agent) -> None:
        if agent.system_prompt:
            self.show("system", agent.system_prompt)
        tools = [
            f"{spec['name']}({', '.join(spec['inputSchema'].get('json', {}).get('properties', ()))})"
            for spec in agent.tool_registry.get_all_tool_specs()
        ]
        self.show("tools", ", ".join(tools) or "none: the policy can only answer")

    def _show_message(self, message: Mapping[str, Any]) -> None:
        for block in message["content"]:
            if "toolUse" in block:
                use = block["toolUse"]
                self.show("call", f"{use['name']} {json.dumps(use['input'], ensure_ascii=False, default=str)}")
            elif "toolResult" in block:
                result = block["toolResult"]
                text = tool_result_text(result["content"]) + self._places.pop(result["toolUseId"], "")
                self.show("error" if result["status"] == "error" else "result", text)
            elif "reasoningContent" in block:
                self.show("thinks", block["reasoningContent"].get("reasoningText", {}).get("text", ""))
            elif "text" in block:
                self.show("policy" if message["role"] == "assistant" else "user", block["text"])
            else:
                self.show(message["role"], f"({', '.join(block)})")

    def end(self, outcome: Outcome, remark: str) -> None:
        """Print how the episode ended, and what of it would be trained."""
        sample, facts = outcome.sample, outcome.facts
        self._console.print()
        if isinstance(sample.reward, Mapping):
            parts = {**sample.reward, "label": sample.label}
            words = [f"{name} {_short(value)}" for name, value in parts.items() if value not in ("", None)]
            self.show("reward", ", ".join(words))
        else:
            self.show("reward", f"{_short(sample.reward)}; label {_short(sample.label)}")
        status = str(sample.status.value)
        counts = f"{counted(facts.get('turns', 0), 'turn')}, {counted(facts.get('tool_calls', 0), 'tool call')}"
        errors = f" ({facts['tool_errors']} with an error)" if facts.get("tool_errors") else ""
        is_failed = sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED)
        self.show("status", f"{status} ({facts.get('stop_reason')}); {counts}{errors}", "red" if is_failed else "")
        if facts.get("error"):
            self.show("error", str(facts["error"]))
        trained = sum(sample.loss_mask or ())
        prompt = len(sample.tokens) - sample.response_length
        siblings = f"; {counted(len(outcome.siblings), 'more sample')}" if outcome.siblings else ""
        read = sample.response_length - trained
        self.show(
            "tokens", remark or f"{trained} trained, {prompt} of the prompt and {read} between turns read{siblings}"
        )
        for found in (*outcome.contract_violations, *outcome.tito_violations):
            self.show("error", found)


def _wrapped(line: str, width: int) -> list[str]:
    if width <= 0 or len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, replace_whitespace=False, drop_whitespace=False, break_on_hyphens=False)


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else textwrap.shorten(str(value), 60, placeholder="...")


_CURRENT: Final[ContextVar[Transcript]] = ContextVar("transcript")


def current_transcript() -> Transcript:
    """The transcript of the episode that is played; the hook that `try` adds to its settings."""
    return _CURRENT.get()


_HOOK: Final = f"{current_transcript.__module__}.{current_transcript.__qualname__}"


def run_try(options: TryOptions) -> int:
    """Play a row and show it; the exit code: 0, 1 if the episode failed, 130 after Ctrl-C.

    Raises:
        RolloutError: The configuration, the row, the engine or the tokenizer can't be used, or the policy's turns end
            before the episode does, or after it.
    """
    try:
        return asyncio.run(_try(options))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
    except PolicyEndedError as e:
        if not options.you:
            raise
        print(f"\n{e}", file=sys.stderr)
    return EXIT_INTERRUPTED


async def _try(options: TryOptions) -> int:
    log, transcript = make_console(stderr=True), Transcript(make_console())

    def note(words: str) -> None:
        log.print(words, markup=False, soft_wrap=True)

    settings, row = await load_settings(options), _row(options, note)
    policy = _policy(options, note)
    if policy is None and (limits := shipped_model_note(options, settings)):
        note(limits)
    if CODE_TOOL_PATH in settings.tools:
        note(f"code runs with isolation {await start_executor(settings.executor)!r}")
    async with AsyncExitStack() as stack:
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if policy is None:
            base_url = await stack.enter_async_context(served_engine(options.base_url, options.model_dir))
            folder = options.tokenizer_dir or await served_tokenizer(base_url)
            note(f"engine at {redacted(parse_base_url(base_url))}")
        else:
            folder = options.tokenizer_dir or SHIPPED_MODEL
            template = _template(folder, settings)
            base_url, ended = await stack.enter_async_context(served_policy(policy, template, transcript))
        given = settings.model_dump(exclude_unset=True) | {"hooks": [*settings.hooks, _HOOK], "max_failed_groups": None}
        given |= {"episode_timeout_s": None} if options.you else {}  # a person takes their time
        # agents beside the main one ask under the same key, which the audit can't tell apart
        is_audited = settings.agent_factory is None
        player = await stack.enter_async_context(playing(base_url, folder, given, audited=is_audited))
        _CURRENT.set(transcript)
        metadata = copy.deepcopy(dict(row.metadata))
        sample = Sample(prompt=row.prompt, label=row.label, index=options.row, group_index=0, metadata=metadata)
        game = asyncio.create_task(player.play(sample, _sampling_params(options)))
        await asyncio.wait([game, ended], return_when=asyncio.FIRST_COMPLETED)  # type: ignore[type-var] # of both kinds
        if ended.done():
            game.cancel()
            with suppress(asyncio.CancelledError):
                await game
            ended.result()
        outcome = game.result()
        no_tokens = "none: an API gives text only, and nothing of this can be trained"
        transcript.end(outcome, no_tokens if options.api_base else "")
        if options.tokens:
            print_transcript(make_console(), outcome.sample, player.decode)
    if isinstance(policy, Script):
        policy.check_end()
    is_failed = outcome.sample.status in (Sample.Status.FAILED, Sample.Status.ABORTED)
    return EXIT_FAILED if is_failed or outcome.contract_violations or outcome.tito_violations else EXIT_OK


def _row(options: TryOptions, note: Any) -> Row:  # noqa: ANN401 - a function of a text
    beside = options.config and options.config.parent / "train.jsonl"
    data = options.data or (beside if beside and beside.is_file() else shipped_rows())
    rows = load_rows(data)
    if options.row >= len(rows):
        raise ConfigError(f"got --row {options.row}; {data} has {len(rows)} rows, 0 to {len(rows) - 1}")
    shipped = " (the shipped problems: name your own with --data FILE)" if data == shipped_rows() else ""
    note(f"row {options.row} of {data}{shipped}")
    return rows[options.row]


def _policy(options: TryOptions, note: Any) -> WrittenPolicy | None:  # noqa: ANN401 - as above
    if options.script is not None:
        return Script.read(options.script)
    if options.you:
        return Person(note)
    if options.api_base is not None and options.api_model is not None:
        note("the API is asked for text: exact tokens, logprobs and training need an SGLang server (--base-url)")
        return ChatApi(options.api_base, options.api_model)
    return None


def _template(folder: Path, settings: RolloutSettings) -> ChatTemplate:
    thinking = {} if settings.enable_thinking is None else {"enable_thinking": settings.enable_thinking}
    return ChatTemplate(load_tokenizer(str(folder)), **thinking)


def _sampling_params(options: TryOptions) -> dict[str, Any]:
    is_embedded = not (options.base_url or options.script or options.you or options.api_base)
    most = options.max_new_tokens or (_MOST_NEW_TOKENS_EMBEDDED if is_embedded else _MOST_NEW_TOKENS)
    seed = {} if options.seed is None else {"sampling_seed": options.seed}
    return slime_sampling_params(options.temperature, most) | seed
