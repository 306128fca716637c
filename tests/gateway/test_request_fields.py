"""Fields of a request: what can change tokens is applied, refused, or listed in the facts as ignored."""

import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest
from anthropic.types.beta import message_create_params as beta_messages
from clients import CHAT, MESSAGES, RESPONSES, Api
from fake_sglang import Reply
from harness import ids_of, run
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses
from programs import TOOLS
from test_matching import ASK, END

from strands_rollout.engine import SHIPPED_MODEL_DIR, running_engine
from strands_rollout.gateway import protocols, session
from strands_rollout.gateway.protocols import APPLIED, HARMLESS, REFUSED
from strands_rollout.integrations.sessions import chat_endpoint
from strands_rollout.model.sampling import turn_seed

HISTORY: dict[str, dict[str, Any]] = {
    "chat": {"messages": [ASK]},
    "responses": {"input": "Hi"},
    "messages": {"messages": [ASK], "max_tokens": 64},
}
SCHEMA = {"type": "object"}


@pytest.mark.parametrize("api", HISTORY)
@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({"regex": "a+"}, {"regex": "a+"}),
        ({"ebnf": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"json_schema": SCHEMA}, {"json_schema": '{"type":"object"}'}),
        ({"json_schema": '{"type": "object"}'}, {"json_schema": '{"type": "object"}'}),
        ({"structural_tag": {"a": 1}}, {"structural_tag": '{"a":1}'}),
        ({"min_tokens": 3}, {"min_new_tokens": 3}),
        ({"min_new_tokens": 3, "min_tokens": 3}, {"min_new_tokens": 3}),
        ({"seed": 7, "top_k": 5, "min_p": 0.1}, {"sampling_seed": turn_seed(7, "1/0"), "top_k": 5, "min_p": 0.1}),
        ({"ignore_eos": True, "stop_token_ids": [5]}, {"ignore_eos": True, "stop_token_ids": [5]}),
    ],
)
async def test_honoured_fields_are_sent_to_the_engine(stage, api, given, sent):
    async with stage([END]) as made:
        assert (await made.post(api, {**HISTORY[api], **given}))[0] == 200
        params = made.fake.requests[0].body["sampling_params"]
        assert {name: params.get(name) for name in sent} == sent
        assert made.session.facts.overridden == {}


@pytest.mark.parametrize("api", HISTORY)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, 1) for name in REFUSED),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("context_management", [{"type": "compaction", "compact_threshold": 1000}]),
        ("context_management", 5),
        ("chat_template_kwargs", {"enable_thinking": False}),
        ("regex", 5),
        ("json_schema", [SCHEMA]),
        ("min_tokens", -1),
        ("min_tokens", 1.5),
        ("seed", "x"),
        ("temperature", True),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
    ],
)
async def test_refused_fields_are_refused(stage, api, field, value):
    async with stage([END]) as made:
        status, answer = await made.post(api, {**HISTORY[api], field: value})
        assert (status, field in answer["error"]["message"]) == (400, True), answer
        assert made.fake.requests == []
        assert made.session.facts.refused == {"invalid_request": 1}


@pytest.mark.parametrize(("field", "status"), [("json_schema", 400), ("unheard_of", 200)])
async def test_unwritable_fields_are_answered(stage, monkeypatch, field, status):
    def encode_json(value):
        if value == {"deep": True}:
            raise ValueError("values are nested too deeply")
        return json.dumps(value).encode()

    for module in (protocols, session):
        monkeypatch.setattr(module, "encode_json", encode_json)
    async with stage([END]) as made:
        got, answer = await made.post("chat", {**HISTORY["chat"], field: {"deep": True}})
        assert (got, "nested too deeply" in str(answer)) == (status, status == 400)
        shown = made.session.facts.overridden.values()
        assert [*shown] == ["a value that can't be written as JSON: values are nested too deeply"] * (status == 200)


@pytest.mark.parametrize(
    ("api", "given", "listed"),
    [
        ("chat", {"reasoning_effort": "high", "verbosity": "low"}, ["reasoning_effort", "verbosity"]),
        ("chat", {"parallel_tool_calls": False}, ["parallel_tool_calls"]),
        ("chat", {"parallel_tool_calls": True}, []),
        ("chat", {"tools": [{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}]}, ["tools.strict"]),
        ("chat", {"unheard_of": 0, "separate_reasoning": False}, ["separate_reasoning", "unheard_of"]),
        ("responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, ["reasoning", "text.verbosity"]),
        ("responses", {"store": True, "prompt_cache_key": "a", "include": ["reasoning.encrypted_content"]}, []),
        ("messages", {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
         ["output_config.effort", "thinking"]),
        ("messages", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ["parallel_tool_calls"]),
        ("messages", {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}},
         ["context_management"]),
        ("messages", {"metadata": {"user_id": "a"}, "cache_control": {"type": "ephemeral"}}, []),
    ],
)  # fmt: skip
async def test_ignored_fields_are_listed_in_the_facts(stage, api, given, listed):
    async with stage([END]) as made:
        assert (await made.post(api, {**HISTORY[api], **given}))[0] == 200
        assert sorted(made.session.facts.overridden) == listed


@pytest.mark.parametrize("own", ["END", ["END"]])
@pytest.mark.parametrize("api", HISTORY)
async def test_session_adds_its_stop_strings_and_limit_to_the_clients(stage, api, own):
    name, limit = ("stop_sequences", "max_tokens") if api == "messages" else ("stop", "max_tokens")
    limit = "max_output_tokens" if api == "responses" else limit
    fixed = {"stop": own, "max_new_tokens": 40, "temperature": 0.7}
    async with stage([END, END], branches=True, sampling_params=fixed) as made:
        bodies = [{name: ["x", "END"], limit: 50, "temperature": 0.1}, {limit: 30}]
        for number, body in enumerate(bodies):
            question = {**ASK, "content": f"Question {number}"}
            history = {"input": [question]} if api == "responses" else {"messages": [question]}
            assert (await made.post(api, {**history, **body}))[0] == 200
        asked = [request.body["sampling_params"] for request in made.fake.requests]
        assert [params["stop"] for params in asked] == [["END", "x"], own]
        assert [params["max_new_tokens"] for params in asked] == [40, 30]
        assert [params["temperature"] for params in asked] == [0.7, 0.7]
        assert made.session.facts.overridden == {"temperature": 0.1}


async def test_listed_fields_are_bounded(stage):
    async with stage([END]) as made:
        body = {**HISTORY["chat"], **{f"{n}{'x' * 2_000}": "y" * 2_000 for n in range(200)}}
        assert (await made.post("chat", body))[0] == 200
    assert len(str(made.session.facts.overridden)) < 20_000


async def test_template_arguments_must_equal_the_policys(stage):
    async with stage([END], chat_template_kwargs={"enable_thinking": False}) as made:
        given = {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": False}
        assert (await made.post("chat", {**HISTORY["chat"], **given}))[0] == 200
        assert made.session.facts.overridden == {}


async def test_request_with_another_grammar_is_not_repeated(stage):
    async with stage([END, "34<|im_end|>"], branches=True) as made:
        answers = [await made.chat([ASK], **more) for more in ({}, {"regex": "[0-9]+"}, {"regex": "[0-9]+"}, {})]
        assert [answer["content"] for answer in answers] == ["It is 34.", "34", "34", "It is 34."]
        assert (len(made.fake.requests), made.session.facts.repeats) == (2, 2)


async def test_repeat_after_a_fork_needs_the_same_grammar(stage):
    async with stage([f"{name}.<|im_end|>" for name in ("one", "two", "three", "four")], branches=True) as made:
        first = await made.chat([ASK], regex="one")
        for question in ("Sure?", "Really?"):
            await made.chat([ASK, first, {**ASK, "content": question}])
        assert (await made.chat([ASK]))["content"] == "four."
        assert await made.chat([ASK], regex="one") == first


async def test_interrupted_turn_is_not_continued_under_a_grammar(stage, shipped_tokenizer):
    """Otherwise the grammar would begin in the middle of the turn."""
    cut = Reply.abort(ids_of(shipped_tokenizer, END)[:2])
    async with stage([cut, END], branches=True, continue_aborted=False) as made:
        assert (await made.post("chat", {"messages": [ASK]}))[0] == 503
        assert (await made.chat([ASK], regex="It.*"))["content"] == END[:-10]
        first, second = made.fake.requests
    assert first.input_ids == second.input_ids


@pytest.mark.parametrize("status", [400, 422])
@pytest.mark.parametrize("api", HISTORY)
async def test_parameter_refused_by_the_engine_is_a_client_error(stage, api, status):
    words = {"error": {"message": "Failed to compile regex grammar"}}
    async with stage([Reply.status(status, words), END]) as made:
        got, answer = await made.post(api, {**HISTORY[api], "regex": "("})
        assert (got, "Failed to compile regex grammar" in answer["error"]["message"]) == (400, True)
        assert "regex" in answer["error"]["message"]
        assert made.session.error is None
        assert (await made.post(api, HISTORY[api]))[0] == 200


@pytest.mark.parametrize(("status", "given"), [(400, {"max_tokens": 5, "stop": "x"}), (404, {"regex": "a"})])
async def test_refusal_without_client_parameters_is_an_engine_error(stage, status, given):
    async with stage([Reply.status(status, {"error": {"message": "no"}})], engine_patience_s=0) as made:
        assert (await made.post("chat", {**HISTORY["chat"], **given}))[0] == 503
        assert made.session.error is not None


async def test_stop_token_outside_the_vocabulary_is_not_sent(stage):
    async with stage([END]) as made:
        size = made.session.model.template.encoder.vocab_size
        for token in (size, 10**6):
            status, answer = await made.post("chat", {**HISTORY["chat"], "stop_token_ids": [token]})
            assert (status, "below the vocabulary size" in answer["error"]["message"]) == (400, True)
            assert (made.fake.requests, made.session.error) == ([], None)
        assert (await made.post("chat", {**HISTORY["chat"], "stop_token_ids": [size - 1]}))[0] == 200


async def test_aborted_turn_with_a_grammar_is_sampled_again(shipped_tokenizer):
    turn = ids_of(shipped_tokenizer, "34<|im_end|>")
    script = [Reply.abort(turn[:1]), Reply.tokens(turn)]
    done = await run(shipped_tokenizer, script, params={"regex": "[0-9]+"})
    first, second = done.fake.requests
    assert first.input_ids == second.input_ids
    assert (done.sample.status.value, done.sample.tokens[-len(turn) :]) == ("completed", turn)
    assert done.facts["sampled_tokens"] == len(turn)


async def test_embedded_engine_refuses_grammars() -> None:
    routes = chat_endpoint(SHIPPED_MODEL_DIR).routes()
    async with running_engine(routes=routes) as url, aiohttp.ClientSession() as http:
        for name in ("regex", "ebnf", "json_schema", "structural_tag"):
            body = {"messages": [ASK], "max_tokens": 4, name: "{}"}
            answer = await http.post(f"{url}/v1/chat/completions", json=body)
            assert answer.status == 400
            assert f"{name} is not supported by the embedded engine" in await answer.text()


@pytest.mark.parametrize(
    "declared",
    [
        chats.CompletionCreateParamsBase,
        responses.ResponseCreateParamsBase,
        beta_messages.MessageCreateParamsBase,
    ],
    ids=["chat", "responses", "messages"],
)
def test_docs_list_each_field_of_the_sdks(declared: type) -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    table = page[page.index("### Fields of a request") : page.index("### Grammars and logprobs")]
    named = set(re.findall(r"`([a-z_]+)(?:[.:`])", table))
    assert sorted(set(declared.__annotations__) - named) == []


def test_docs_classify_fields_like_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/gateway.md").read_text()
    rows = {row[0]: set(re.findall(r"`([a-z_]+)`", row[1])) for row in re.findall(r"\| (\w+) \| (.*) \|", page)}
    assert rows["refused"] >= set(REFUSED)
    assert rows["harmless"] == set(HARMLESS)
    assert len(APPLIED | HARMLESS | set(REFUSED)) == len(APPLIED) + len(HARMLESS) + len(REFUSED)


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("api", [CHAT, RESPONSES, MESSAGES], ids=["chat", "responses", "messages"])
async def test_sdks_do_not_retry_an_engine_failure(stage, api: Api, streams: bool) -> None:
    async with stage(lambda _body, _number: Reply.status(503), engine_patience_s=0) as made:
        sdk, url = (anthropic, made.gateway.base_url) if api is MESSAGES else (openai, f"{made.gateway.base_url}/v1")
        kind = sdk.AsyncAnthropic if api is MESSAGES else sdk.AsyncOpenAI
        async with kind(base_url=url, api_key=made.key, max_retries=2) as client:
            resource = client
            for name in api.resource.split("."):
                resource = getattr(resource, name)
            request = {"model": "m", **api.request([ASK]), **({"stream": True} if streams else {})}
            with pytest.raises(sdk.InternalServerError):
                await resource.create(**request)
        assert made.session.facts.requests == 1
