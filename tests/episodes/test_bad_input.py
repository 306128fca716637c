"""`generate` with bad input and faulty engines: untrained samples with the reason; outages that episodes survive."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fake_sglang import FakeSGLang, Reply, dead_url
from harness import ANSWER, args_for, call_text, ids_of, run

from strands_rollout import Sample, generate
from strands_rollout.client.client import SGLangClient
from strands_rollout.errors import ConfigError
from strands_rollout.slime_plugin.sample_contract import contract_violations

Status = Sample.Status


def assert_untrained(sample: Any, status: Any = Status.FAILED) -> None:
    assert sample.status is status
    assert sample.remove_sample
    assert sum(sample.loss_mask) == 0
    assert_valid(sample)


def assert_valid(sample: Any) -> None:
    sample.reward = 0.0  # slime calls the reward function later
    assert contract_violations(sample) == []


@pytest.fixture(autouse=True)
def _fast_retries(retry_waits: list[float]) -> None:
    """Retry without waiting."""


async def test_generate_with_a_dead_engine_fails_untrained(
    shipped_tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    url = dead_url()
    sample = await generate(args_for(url, shipped_tokenizer), Sample(prompt="2+2?", index=3), {"max_new_tokens": 10})
    assert_untrained(sample)
    facts = sample.metadata["strands_rollout"]
    assert facts["stop_reason"] == "engine_error"
    assert url in facts["error"]
    assert "attempts" in facts["error"]
    assert "index=3 stop_reason=engine_error" in caplog.text
    assert shipped_tokenizer.decode(sample.tokens[:-1]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply.status(503, "no workers"), "503"),
        (Reply.raw(b"<html>hello</html>"), "not valid JSON"),
        (Reply.status(422, "wrong type"), "422"),
        (Reply.tokens([10**7]), "vocab"),
    ],
    ids=["503", "garbage", "422", "id outside the vocabulary"],
)
async def test_generate_with_a_faulty_engine_fails_untrained(
    shipped_tokenizer: Any, reply: Reply, message: str
) -> None:
    done = await run(shipped_tokenizer, lambda request, number: reply)
    assert_untrained(done.sample)
    assert done.facts["stop_reason"] == "engine_error"
    assert message in done.facts["error"]


async def test_generate_masks_turns_before_an_engine_death(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, lambda request, n: call_text() if n == 0 else Reply.status(503, "gone"))
    assert_untrained(done.sample)
    assert done.facts["turns"] == 1
    assert done.sample.tokens[-len(ids_of(shipped_tokenizer, call_text())) :] == ids_of(shipped_tokenizer, call_text())


@pytest.mark.parametrize("fault", [Reply.reset(), Reply.status(503), Reply.status(500)], ids=repr)
@pytest.mark.parametrize("turn", [0, 1])
async def test_generate_survives_an_engine_outage(shipped_tokenizer, retry_waits, fault, turn) -> None:
    """The engine fails for all of 16 episodes before their first or second turn, for 30 s of retry waits."""
    arrived = 0

    async def reply(request: dict[str, Any], _number: int) -> Reply:
        nonlocal arrived
        is_first = call_text() not in shipped_tokenizer.decode(request["input_ids"])
        if not is_first and turn == 1:
            arrived += 1
            if arrived == 16:
                fake.outage = fault
        return Reply.tokens(ids_of(shipped_tokenizer, call_text() if is_first else ANSWER))

    async with FakeSGLang(reply, context_length=8192) as fake:
        fake.outage = fault if turn == 0 else None
        args = args_for(fake.base_url, shipped_tokenizer)

        async def come_back() -> None:
            while sum(retry_waits) < 30:  # noqa: ASYNC110 - no event is set for a wait
                await asyncio.sleep(0.001)
            fake.outage = None

        back = asyncio.create_task(come_back())
        samples = [Sample(prompt="What is 17 * 2?", index=index) for index in range(16)]
        await asyncio.gather(*(generate(args, sample, {"max_new_tokens": 512}) for sample in samples))
        back.cancel()
    assert ({sample.status for sample in samples}, fake.violations) == ({Status.COMPLETED}, [])


async def test_generate_timeout_in_an_outage_is_an_engine_error(shipped_tokenizer, monkeypatch) -> None:
    monkeypatch.setitem(SGLangClient.__init__.__kwdefaults__, "sleep", lambda _seconds: asyncio.sleep(60))
    done = await run(shipped_tokenizer, [Reply.status(503, "gone")], settings={"episode_timeout_s": 3.0})
    assert_untrained(done.sample)
    assert done.facts["stop_reason"] == "engine_error"
    assert "the episode took more than 3 s; the engine fails: HTTP 503: gone" in done.facts["error"]


async def test_generate_prompt_longer_than_the_context(shipped_tokenizer: Any) -> None:
    done = await run(shipped_tokenizer, [ANSWER], prompt="many words " * 500, context_length=200)
    assert_untrained(done.sample, Status.TRUNCATED)
    assert done.facts["stop_reason"] == "prompt_too_long"
    assert "no token of the context budget is left" in done.facts["error"]
    assert done.fake.requests == []


@pytest.mark.parametrize("prompt", ["", None])
async def test_generate_unusable_prompt_is_a_setup_error(shipped_tokenizer: Any, prompt: Any) -> None:
    done = await run(shipped_tokenizer, [ANSWER], prompt=prompt)
    assert_untrained(done.sample)
    assert done.facts["stop_reason"] == "setup_error"
    assert "expected" in done.facts["error"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tool_iteration": 3}, "did you mean 'max_tool_iterations'"),
        ({"tools": ["no.such.tool"]}, "no.such.tool"),
        ({"reward": "no.such.reward"}, "no.such.reward"),
    ],
)
async def test_generate_invalid_setting_fails_untrained(shipped_tokenizer: Any, settings: Any, message: str) -> None:
    done = await run(shipped_tokenizer, [ANSWER], settings=settings)
    assert_untrained(done.sample)
    assert message in done.facts["error"]


@pytest.mark.parametrize(
    ("args", "message"), [({}, "hf_checkpoint"), ({"hf_checkpoint": "/nonexistent/model"}, "/nonexistent/model")]
)
async def test_generate_missing_args_fail_untrained(args: dict[str, Any], message: str) -> None:
    namespace = SimpleNamespace(sglang_router_ip="127.0.0.1", sglang_router_port=1, **args)
    sample = await generate(namespace, Sample(prompt="x"), {"max_new_tokens": 5})
    assert_untrained(sample)
    assert message in sample.metadata["strands_rollout"]["error"]


async def test_generate_overwrites_stale_sample_fields(shipped_tokenizer: Any) -> None:
    sample = Sample(prompt="What is 17 * 2?", status=Status.FAILED, tokens=[1, 2, 3], response_length=99, loss_mask=[1])
    sample.metadata["strands_rollout"] = "something else"
    done = await run(shipped_tokenizer, [ANSWER], sample=sample)
    assert done.sample.status is Status.COMPLETED
    assert_valid(done.sample)
    assert done.sample.response_length == len(ids_of(shipped_tokenizer, ANSWER))


async def test_generate_logs_an_internal_error_with_traceback(shipped_tokenizer, caplog, monkeypatch) -> None:
    import strands_rollout.slime_plugin.episode

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(strands_rollout.slime_plugin.episode, "episode_prompt", broken)
    done = await run(shipped_tokenizer, [ANSWER])
    assert_untrained(done.sample)
    assert (done.facts["stop_reason"], caplog.text.count("Traceback")) == ("internal_error", 1)
    assert "ZeroDivisionError: a bug" in caplog.text


@pytest.mark.parametrize(
    "params", [None, [], "temperature", 5, {1: 2}, {"max_new_tokens": "many"}, {"max_new_tokens": -1}]
)
async def test_generate_invalid_sampling_params_are_a_setup_error(shipped_tokenizer: Any, params: Any) -> None:
    async with FakeSGLang([]) as fake:
        sample = await generate(args_for(fake.base_url, shipped_tokenizer), Sample(prompt="x"), params)
    assert_untrained(sample)
    facts = sample.metadata["strands_rollout"]
    assert facts["stop_reason"] == "setup_error"
    assert "expected" in facts["error"]


@pytest.mark.parametrize(
    "sample", [None, {}, object(), "sample", [Sample(prompt="x")], SimpleNamespace(prompt="x", metadata={})]
)
async def test_generate_refuses_objects_other_than_samples(sample: Any) -> None:
    with pytest.raises(ConfigError, match="expected slime's Sample"):
        await generate(SimpleNamespace(), sample, {"max_new_tokens": 5})


class ArgsThatRaise:
    def __init__(self, args: SimpleNamespace, name: str, error: BaseException) -> None:
        self._args, self._name, self._error = args, name, error

    def __getattr__(self, name: str) -> Any:
        if name == self._name:
            raise self._error
        return getattr(self._args, name)


@pytest.mark.parametrize("error", [RuntimeError("no"), SystemExit(1), KeyboardInterrupt(), GeneratorExit()], ids=repr)
@pytest.mark.parametrize(
    "name",
    ["strands_rollout", "hf_checkpoint", "num_layers", "rollout_function_path", "sglang_router_ip", "partial_rollout"],
)
async def test_generate_with_args_that_raise(shipped_tokenizer: Any, name: str, error: BaseException) -> None:
    async with FakeSGLang([Reply.tokens(ids_of(shipped_tokenizer, ANSWER))] * 2) as fake:
        args = ArgsThatRaise(args_for(fake.base_url, shipped_tokenizer), name, error)
        sample = await generate(args, Sample(prompt="x"), {"max_new_tokens": 500})
    if sample.status is Status.FAILED:
        assert_untrained(sample)
    else:  # this episode doesn't read the argument
        assert_valid(sample)
