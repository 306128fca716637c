"""Hostile policies: every sampled token is trained, in any format, with any tool, and without an internal error."""

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply
from family_templates import TEMPLATES, tokenizer_with
from harness import ANSWER, TOOL_CALL, args_for, ids_of, run
from hostile_turns import VALUES, random_reply, random_turn, raw_turn
from parser_families import family
from pydantic import BaseModel
from strands import Agent, tool
from strands.agent.conversation_manager import SlidingWindowConversationManager
from strands.hooks import AfterToolCallEvent, BeforeToolCallEvent, HookProvider, HookRegistry
from strands.types.tools import AgentTool

from strands_rollout import Sample, SGLangModel, Task, generate, sub_agent_model, tool_parsers
from strands_rollout.slime_plugin.sample_contract import contract_violations
from strands_rollout.template.chat_template import ChatTemplate

TRAINED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@tool
async def echo(
    text: str = "",
    n: int = 0,
    f: float = 0.0,
    items: list[Any] | None = None,
    flag: bool = False,
    d: dict | None = None,
) -> str:
    """Show the arguments."""
    return f"{text} {n} {f} {items} {flag} {d}"


@tool
def reflect(value: Any = None) -> Any:
    """Return the argument."""
    return value


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not printable")


class UnprintableObject:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise ValueError("not comparable")

    def __str__(self) -> str:
        raise RuntimeError("not printable")

    __repr__ = __str__


def hostile_value(kind: str) -> Any:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    known = {
        "deep": deep,
        "huge": 10**5000,
        "bytes": b"\xff\x00",
        "set": {1, "x", None},
        "cycle": cycle,
        "object": UnprintableObject(),
    }
    known |= {"generator": (n for n in range(3)), "surrogate": "\ud800"}
    return known.get(kind, kind)


@tool
async def weird(kind: str = "", value: Any = None) -> Any:
    """Fail or return a hostile value, as `kind` says."""
    if kind == "raise":
        raise UnprintableError
    if kind == "cause":
        raise KeyError("\ud800") from UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")
    if kind == "cancel":
        raise asyncio.CancelledError
    if value is None:
        return hostile_value(kind)
    return {"status": value, "content": [{"json": hostile_value(kind)}, {"text": hostile_value(kind)}]}


class RawTool(AgentTool):
    tool_name = "raw"
    tool_type = "python"

    @property
    def tool_spec(self) -> Any:
        return {"name": "raw", "description": "Raw.", "inputSchema": {"json": {"type": "object", "properties": {}}}}

    async def stream(self, tool_use: Any, invocation_state: Any, **kwargs: Any) -> Any:
        arguments = tool_use["input"]
        yield (
            hostile_value(arguments["kind"])
            if isinstance(arguments.get("kind"), str)
            else arguments.get("value", arguments)
        )


raw = RawTool()


class CallReadingHook(HookProvider):
    def register_hooks(self, registry: HookRegistry, **kwargs: Any) -> None:
        registry.add_callback(BeforeToolCallEvent, lambda event: event.tool_use["name"])
        registry.add_callback(AfterToolCallEvent, lambda event: event.result["status"])


class Answer(BaseModel):
    """The answer."""

    value: int = 0


TOOLS = [f"{__name__}.{name}" for name in ("echo", "reflect", "raw", "weird")]


def structured_output_agent(model: SGLangModel, task: Task) -> Agent:
    return Agent(model=model, tools=list(task.tools), structured_output_model=Answer, callback_handler=None)


def agent_with_helper(model: SGLangModel, task: Task) -> Agent:
    helper = Agent(model=sub_agent_model(), name="echo", tools=[reflect, weird], callback_handler=None)
    return Agent(model=model, tools=[helper, reflect], callback_handler=None)


def short_memory() -> SlidingWindowConversationManager:
    return SlidingWindowConversationManager(window_size=4)


VARIANTS: dict[str, dict[str, Any]] = {
    "simple": {"tools": TOOLS[:2]},
    "all": {"tools": TOOLS, "max_tool_iterations": 4, "max_parallel_tool_calls": 5},
    "hooks": {"tools": TOOLS, "hooks": [f"{__name__}.CallReadingHook"]},
    "structured": {"tools": TOOLS, "agent_factory": f"{__name__}.structured_output_agent"},
    "helper": {"agent_factory": f"{__name__}.agent_with_helper", "fan_out": True},
    "short memory": {"tools": TOOLS, "conversation_manager": f"{__name__}.short_memory"},
}


@pytest.fixture(scope="session")
def checkpoints(shipped_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder, made = tmp_path_factory.mktemp("families"), dict[str, Any]()

    def checkpoint(known: str) -> Any:
        if known not in made:
            made[known] = tokenizer_with(TEMPLATES[known][1], shipped_tokenizer)
            made[known].name_or_path = str(folder / known)
            made[known].save_pretrained(folder / known)
        return made[known]

    return checkpoint


async def play_hostile(tokenizer: Any, known: str, rng: random.Random, settings: dict[str, Any]) -> list[Any]:
    """Play an episode with random turns, at times aborted and resumed, and return its samples."""
    template = ChatTemplate(tokenizer)
    ends = [*template.end_ids, tokenizer.eos_token_id]
    flags = {"abort": False}
    abort_at = rng.choice((None, None, None, 1, 2))

    def next_reply(request: dict[str, Any], number: int) -> Reply:
        if number == abort_at and "agent_factory" not in settings:
            flags["abort"] = True
            return Reply.abort(ids_of(tokenizer, "so"))
        if number > 5:
            return Reply.tokens([*ids_of(tokenizer, "34"), ends[0]])
        text = random_turn(family(known), rng, in_reasoning=template.opens_reasoning)
        return random_reply(tokenizer, text, rng, ends).limited(request["sampling_params"].get("max_new_tokens"))

    options = {
        "tool_parser": TEMPLATES[known][0],
        "system_prompt": "",
        "should_abort": lambda: flags["abort"],
        **settings,
    }
    async with FakeSGLang(next_reply, episode_of=lambda _: None, context_length=rng.choice((4096, 60_000))) as fake:
        args = args_for(fake.base_url, tokenizer, strands_rollout=options)
        sample: Any = Sample(prompt="What is 17 * 2?", label="34", index=0)
        params = {"temperature": 1.0, "max_new_tokens": rng.choice((600, 4000, 50_000))}
        for _ in range(2):
            flags["abort"] = False
            done = await generate(args, sample, params)
            sample = done[0] if isinstance(done, list) else done
            if sample.status is not Sample.Status.ABORTED:
                break
    assert fake.violations == []
    return done if isinstance(done, list) else [done]


def check(samples: Sequence[Any], caplog: pytest.LogCaptureFixture) -> None:
    for sample in samples:
        facts = sample.metadata["strands_rollout"]
        if facts["stop_reason"] == "prompt_too_long" and sample.status is Sample.Status.TRUNCATED:
            continue
        assert sample.status in TRAINED, (facts["stop_reason"], facts["error"])
        sample.reward = 0.0
        assert contract_violations(sample) == []
    assert "bug in a tool parser" not in caplog.text


@pytest.mark.parametrize("known", TEMPLATES)
async def test_generate_plays_calls_with_any_argument(
    checkpoints: Any, known: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer, values = checkpoints(known), [value for value in VALUES if len(value) < 4_500]
    template = ChatTemplate(tokenizer)
    turn = "\n".join(raw_turn(family(known), [("echo", {"n": value}), ("raw", {"value": value})]) for value in values)
    prefix = family(known).reasoning[1] if template.opens_reasoning else ""
    turns = [
        Reply.tokens([*ids_of(tokenizer, text), template.end_of_calls_id])
        for text in (prefix + turn, prefix + raw_turn(family(known), [("echo", {"n": "9" * 309})]), prefix + "34")
    ]
    settings = {"tools": TOOLS, "tool_parser": TEMPLATES[known][0], "system_prompt": ""}
    limits = {"params": {"max_new_tokens": 400_000}, "context_length": 500_000}
    done = await run(tokenizer, turns, settings=settings, **limits)
    check([done.sample], caplog)
    assert (done.facts["stop_reason"], done.facts["turns"]) == ("completed", 3)
    assert done.facts["tool_calls"] + done.facts["parse_failures"] > 0


@pytest.mark.parametrize("known", TEMPLATES)
async def test_generate_trains_hostile_turns(checkpoints: Any, known: str, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(known)
    check(await play_hostile(checkpoints(known), known, rng, VARIANTS[rng.choice(playable(known))]), caplog)


def playable(known: str) -> list[str]:
    """Return the variants for a template; Mistral Nemo's refuses the second user turn of structured output."""
    return [name for name in VARIANTS if (known, name) != ("mistral-nemo", "structured")]


def called(*names: str) -> str:
    calls = (TOOL_CALL.format(name=name, arguments=json.dumps({"text": f"({n})"})) for n, name in enumerate(names))
    return "".join(calls).replace("<|im_end|>", "") + "<|im_end|>"


def results_after(done: Any, turn: int) -> list[str]:
    return re.findall(r"<tool_response>\n(.*?)\n</tool_response>", done.context_after(turn), re.DOTALL)


INTERNAL_NAMES = ("invalid_tool_call", "INVALID_TOOL_NAME", "Answer", "call_1_0_unparsed", "execute_python_code")
UNPARSED = '<tool_call>\n{"name": "invalid_tool_call", "arguments": 1}\n</tool_call>'


@pytest.mark.parametrize("variant", ["simple", "hooks", "short memory"])
async def test_generate_treats_internal_tool_names_as_unknown(shipped_tokenizer: Any, variant: str) -> None:
    turns = [called(*INTERNAL_NAMES), UNPARSED + called(INTERNAL_NAMES[0], "echo"), called(INTERNAL_NAMES[0]), ANSWER]
    done = await run(shipped_tokenizer, turns, settings=VARIANTS[variant])
    assert (done.facts["stop_reason"], done.sample.status) == ("completed", Sample.Status.COMPLETED)
    assert results_after(done, 0) == [f"Unknown tool: {name}" for name in INTERNAL_NAMES]
    unparsed, *others = results_after(done, 1)
    assert "could not be parsed and was not run: the arguments are a number" in unparsed
    assert others == ["Unknown tool: invalid_tool_call", "(1) 0 0.0 None False None"]
    assert results_after(done, 2) == others[:1]
    assert (done.facts["parse_failures"], done.facts["tool_calls"]) == (1, len(INTERNAL_NAMES) + 3)
    assert (done.facts["unknown_tools"], done.facts["tool_errors"]) == (len(INTERNAL_NAMES) + 2,) * 2
    assert sum(done.sample.loss_mask) == sum(len(reply.ids) for reply in done.replied)


ODD_NAMES = ("no.such", "x" * 65, "a b", "é")


@pytest.mark.parametrize("variant", ["simple", "hooks", "short memory", "structured"])
async def test_generate_orders_results_by_their_calls(shipped_tokenizer: Any, variant: str) -> None:
    turns = [called("echo", "no.such", "echo", *ODD_NAMES, "echo"), ANSWER, "34<|im_end|>"]
    done = await run(shipped_tokenizer, turns, settings=VARIANTS[variant])
    errors = ["Er"] * len(ODD_NAMES)
    assert [result[:2] for result in results_after(done, 0)] == ["(0", "Er", "(2", *errors, "(7"]
    # Strands replaces such names on some paths; this must not begin another segment
    assert (done.facts["stop_reason"], done.facts["segments"]) == ("completed", 1)


class BuggyParser:
    def __init__(self, _new_id: Any) -> None: ...

    def segments(self, text: str, in_reasoning: bool = False) -> Any:
        if "call" in text:
            raise ZeroDivisionError("a bug")
        return []

    parse = segments


async def test_generate_tool_parser_bug_is_a_parse_failure(shipped_tokenizer, caplog, monkeypatch) -> None:
    monkeypatch.setitem(tool_parsers._factories, "buggy", BuggyParser)  # type: ignore[arg-type]
    settings = {**VARIANTS["simple"], "tool_parser": "buggy"}
    turns = ["I call<|im_end|>", "I call again<|im_end|>", "34<|im_end|>"]
    done = await run(shipped_tokenizer, turns, settings=settings)
    assert (done.facts["stop_reason"], done.facts["parse_failures"]) == ("completed", 2)
    assert "the turn can't be read: ZeroDivisionError" in results_after(done, 0)[0]
    assert sum(done.sample.loss_mask) == sum(len(reply.ids) for reply in done.replied)
    assert caplog.text.count("Traceback") == 1
    assert "bug in a tool parser parser=BuggyParser" in caplog.text
