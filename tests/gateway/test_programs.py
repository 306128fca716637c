"""Episodes of agent programs: results and scores, stop reasons, aborts, and resuming by replay."""

import sys
from dataclasses import replace
from typing import Any

import programs
import pytest
import recorded_tools
from fake_sglang import FakeSGLang, Reply
from harness import TOOL_CALL, args_for, call_text, ids_of, run
from interruptible_policy import ANSWER, LAYERS, TOP_K, InterruptiblePolicy, abort_after, call, prompt_of, turn

from strands_rollout import Sample, generate, reward_func
from strands_rollout.samples import finished_samples
from strands_rollout.slime_plugin.metrics import gateway_metrics
from strands_rollout.slime_plugin.sample_contract import contract_violations

CALLS = [call_text("a", name="add"), call_text("b", name="add")]
TURNS = [*CALLS, "The answer is \\boxed{34}.<|im_end|>"]


def violations(sample: Any) -> list[str]:
    return contract_violations(replace(sample, reward=1.0))


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    programs.told.clear()


async def test_program_episode_is_one_sample_and_its_text_is_graded(shipped_tokenizer):
    played = await run(shipped_tokenizer, TURNS, settings={"agent_program": "programs.chat"})
    sample, facts = played.sample, played.facts
    assert (sample.status.value, facts["turns"], facts["tool_iterations"], facts["tool_calls"]) == (
        "completed",
        3,
        2,
        2,
    )
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(len(reply.ids) for reply in played.replied)
    assert [call["tool"] for call in facts["calls"]] == ["add", "add"]
    assert facts["gateway"]["requests"] == 3
    assert facts["final_text"] == "The answer is \\boxed{34}."
    assert violations(sample) == []
    assert (await reward_func(args_for(played.fake.base_url, shipped_tokenizer), sample))["score"] == 1.0


async def test_program_sample_with_a_big_integer_is_trained(shipped_tokenizer):
    """The turn after the call is aborted, and the program is started again."""
    call = TOOL_CALL.format(name="add", arguments=f'{{"code": "a", "n": [{10**30}, -{10**30}]}}')
    script = [call, Reply.abort(ids_of(shipped_tokenizer, TURNS[-1])[:4])]
    given: dict[str, Any] = {"agent_program": "programs.chat", "resumable": "replay", "on_engine_abort": "return"}
    first = await run(shipped_tokenizer, script, settings=given, args={"partial_rollout": True})
    assert first.sample.status.value == "aborted"
    rest = Reply.tokens(ids_of(shipped_tokenizer, TURNS[-1])[4:])
    played = await run(shipped_tokenizer, [rest], settings=given, sample=first.sample, args={"partial_rollout": True})
    assert (played.sample.status.value, played.facts["gateway"]["diverged"]) == ("completed", "")
    assert (played.facts["gateway"]["repeats"], played.facts["gateway"]["changed_calls"]) == (1, 0)
    assert sum(played.sample.loss_mask) == sum(len(ids_of(shipped_tokenizer, text)) for text in (call, TURNS[-1]))
    assert violations(played.sample) == []


class _JoinsNoExperts(Sample):
    """Like slime's Sample before 0.3.1, for which this package joins the routed experts."""

    append_response_tokens = property()


async def test_program_sample_equals_that_of_an_agent_in_process(shipped_tokenizer):
    """The episode has a weight update within a turn, a seed, and routed experts."""

    def disturb(asked: Any) -> Any:
        if asked.turn == 1 and asked.done:
            fake.engine.update_weights("2")
        return abort_after(4) if asked.turn == 1 and not asked.done else None

    plan = [turn("Both.", call("work", "a"), call("fail", "b")), turn(call("work")), ANSWER]
    given = {"tools": [*recorded_tools.PATHS, "recorded_tools.die"], "system_prompt": None}
    replayed = {"use_rollout_routing_replay": True, "num_layers": LAYERS, "moe_router_topk": TOP_K}
    samples, values, asked = [], [], []
    for player in ({}, *[{"agent_program": "recorded_tools.program"}] * 2):
        policy = InterruptiblePolicy(shipped_tokenizer, {"job": plan}, disturb)
        async with FakeSGLang(policy, context_length=8192, weight_version="1") as fake:
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout={**given, **player}, **replayed)
            sample = _JoinsNoExperts(prompt=prompt_of("job", 0), label="34", index=0, session_id="job-0")
            params = {"temperature": 1.0, "max_new_tokens": 4096, "sampling_seed": 7}
            samples.append(await generate(args, sample, params))
        assert (policy.violations, fake.violations) == ([], [])
        asked.append([{name: value for name, value in one.body.items() if name != "rid"} for one in fake.requests])
        facts = sample.metadata["strands_rollout"]
        told = {name: facts[name] for name in ("spans", "weight_versions", "engine_aborts", "tool_calls")}
        values.append(programs.filled(sample) | told)
        assert max(at_s for _turn, at_s, _s in facts["requests"]) <= facts["duration_s"]
    assert values[0] == values[1] == values[2]
    assert asked[0] == asked[1] == asked[2]  # including seeds and the first requested row of experts
    assert (sample.status.value, sample.weight_versions) == ("completed", ["1", "1", "2", "2"])
    assert sample.rollout_routed_experts[0].tolist() == [[11, 12], [13, 14]]
    found = gateway_metrics(finished_samples(samples))
    assert (found["gateway/requests/mean"], found["gateway/forks/max"], found["gateway/refused/max"]) == (3, 0, 0)


@pytest.mark.parametrize(("program", "score"), [("chat_and_score", 0.25), ("in_a_thread", 0.5)])
async def test_program_score_is_the_reward(shipped_tokenizer, program, score):
    turns = TURNS if program == "chat_and_score" else TURNS[-1:]
    played = await run(shipped_tokenizer, turns, settings={"agent_program": f"programs.{program}"})
    assert (await reward_func(args_for(played.fake.base_url, shipped_tokenizer), played.sample))["score"] == score


@pytest.mark.parametrize(
    ("program", "settings", "turns", "reason", "status"),
    [
        ("raises", {}, TURNS[-1:], "setup_error", "failed"),
        ("raises", {"max_turn_tokens": 20}, [Reply.tokens([5] * 20, "length")], "turn_length", "truncated"),
        ("asks_nothing", {}, [], "setup_error", "failed"),
        ("never_ends", {"episode_timeout_s": 1.0}, TURNS[-1:], "episode_timeout", "truncated"),
        ("chat", {"max_tool_iterations": 1}, TURNS, "max_tool_iterations", "truncated"),
        ("chat", {"max_tool_calls": 1}, TURNS, "max_tool_calls", "truncated"),
        ("chat", {"max_tool_iterations": 1, "max_tool_calls": 1}, TURNS, "max_tool_iterations", "truncated"),
        ("twice", {"max_user_turns": 1}, TURNS[-1:] * 3, "max_user_turns", "truncated"),
        ("chat", {"max_turn_tokens": 20}, [Reply.tokens([5] * 20, "length")], "turn_length", "truncated"),
        ("chat", {"engine_patience_s": 0}, [Reply.status(503)], "engine_error", "failed"),
    ],
)
async def test_program_stop_reasons(shipped_tokenizer, program, settings, turns, reason, status):
    given = {"agent_program": f"programs.{program}", **settings}
    played = await run(shipped_tokenizer, turns, settings=given)
    assert (played.facts["stop_reason"], played.sample.status.value) == (reason, status)
    assert violations(played.sample) == []
    if program == "raises":
        assert "agent_program 'programs.raises' raised ValueError: no luck" in played.facts["error"]
        assert any(played.sample.loss_mask) is (status == "truncated")


async def test_program_ends_at_a_used_up_budget(shipped_tokenizer):
    turns, params = [TURNS[0], Reply.tokens([5] * 8, "length")], {"max_new_tokens": 40}
    played = await run(shipped_tokenizer, turns, settings={"agent_program": "programs.chat"}, params=params)
    assert (played.facts["stop_reason"], played.sample.status.value) == ("response_length", "truncated")
    assert played.sample.response_length <= params["max_new_tokens"]


@pytest.mark.parametrize(("program", "score"), [(None, -1.0), ("chat", -1.0), ("chat_and_answer", 1.0)])
async def test_program_cut_turn_is_no_answer_unless_returned(shipped_tokenizer, program, score):
    said = ids_of(shipped_tokenizer, "So the answer: 34")  # the beginning of "345"
    settings = {"max_turn_tokens": len(said)} | ({"agent_program": f"programs.{program}"} if program else {})
    played = await run(shipped_tokenizer, [Reply.tokens(said, "length")], settings=settings)
    assert (played.facts["stop_reason"], played.sample.label) == ("turn_length", "34")
    assert played.facts["final_is_cut"] is (program != "chat_and_answer")
    assert (await reward_func(args_for(played.fake.base_url, shipped_tokenizer), played.sample))["score"] == score


class _Flag:
    is_up = False

    def __call__(self) -> bool:
        return self.is_up


@pytest.mark.parametrize(
    "command", [None, {"command": "python -c", "args": ["import time; time.sleep(600)", "{prompt}"]}]
)
async def test_abort_ends_a_program(shipped_tokenizer, command):
    flag = _Flag()

    def script(_body: dict[str, Any], _number: int) -> str:
        flag.is_up = True
        return TURNS[-1]

    player = {"agent_command": command} if command else {"agent_program": "programs.never_ends"}
    flag.is_up = command is not None
    settings = {**player, "should_abort": flag}
    played = await run(shipped_tokenizer, script, settings=settings, args={"partial_rollout": True})
    assert (played.facts["stop_reason"], played.sample.status.value) == ("aborted", "aborted")
    assert played.facts["turns"] == (command is None)


async def _attempts(
    tokenizer: Any, program: str, *cuts_in_order: tuple[int, int], **settings: Any
) -> tuple[Any, list[Any]]:
    """Resume a sample until it is no longer aborted; return it, and the number of requests in each attempt.

    Each cut is the number of the turn to abort, and the number of its tokens sampled before.
    """
    flag, texts, asked = _Flag(), [ids_of(tokenizer, text) for text in TURNS], []
    cuts = [*cuts_in_order]

    def script(body: dict[str, Any], _number: int) -> Reply:
        text = tokenizer.decode(body["input_ids"])
        if "A title for" in text:
            return Reply.tokens(ids_of(tokenizer, "A title.<|im_end|>"))
        begun = text.rpartition("<|im_start|>assistant\n")[2]
        turn = text.count("is done\n</tool_response>")
        at = len(ids_of(tokenizer, begun)) if begun else 0
        if cuts and cuts[0][0] == turn:
            flag.is_up = True
            return Reply.abort(texts[turn][at : at + cuts.pop(0)[1]])
        return Reply.tokens(texts[turn][at:])

    sample = Sample(prompt="What is 17 * 2?", label="34", index=0)
    for _ in range(len(cuts_in_order) + 2):
        flag.is_up = False
        async with FakeSGLang(script, context_length=8192) as fake:
            given = {"agent_program": f"programs.{program}", "should_abort": flag, **settings}
            args = args_for(fake.base_url, tokenizer, strands_rollout=given, partial_rollout=True)
            sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096})
            asked.append(len(fake.requests))
        if sample.status.value != "aborted":
            break
    return sample, asked


@pytest.mark.parametrize("cut", [(0, 5), (1, 5), (1, 0), (2, 4)])
async def test_replay_answers_a_restarted_program(shipped_tokenizer, cut):
    whole, _ = await _attempts(shipped_tokenizer, "chat")
    programs.told.clear()
    sample, asked = await _attempts(shipped_tokenizer, "chat", cut, resumable="replay")
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["resumes"], facts["gateway"]["diverged"]) == ("completed", 1, "")
    assert (sample.tokens, sample.loss_mask) == (whole.tokens, whole.loss_mask)
    assert asked == [cut[0] + 1, 3 - cut[0]]
    assert programs.told == [*["a", "b"][: cut[0]], "a", "b"]  # the program's tools run again
    assert facts["gateway"]["repeats"] == cut[0]
    assert (facts["tool_iterations"], facts["dropped_sampled_tokens"]) == (2, 0)
    told = [(call["id"], call["tool"], call["status"]) for call in facts["calls"]]
    assert told == [(call["id"], call["tool"], call["status"]) for call in whole.metadata["strands_rollout"]["calls"]]


@pytest.mark.parametrize("cut", [(1, 5), (1, 0)])
async def test_replay_counts_no_user_turn_for_a_repeated_request(shipped_tokenizer, cut):
    settings = {"resumable": "replay", "max_user_turns": 0}
    sample, _ = await _attempts(shipped_tokenizer, "chat", cut, **settings)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["resumes"], facts["stop_reason"]) == ("completed", 1, "completed")


@pytest.mark.parametrize("settings", [{}, {"resumable": "replay"}])
async def test_replay_restarts_for_another_request(shipped_tokenizer, settings):
    sample, asked = await _attempts(shipped_tokenizer, "changing" if settings else "chat", (1, 5), **settings)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, asked) == ("completed", [2, 3])
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(len(ids_of(shipped_tokenizer, t)) for t in TURNS)
    assert facts["dropped_sampled_tokens"] == len(ids_of(shipped_tokenizer, TURNS[0])) + 5
    assert violations(sample) == []
    assert ("message 0" in facts["gateway"]["diverged"]) == bool(settings)


async def test_replay_counts_dropped_tokens_of_each_restart(shipped_tokenizer):
    """In the second attempt the sample begins at the first difference; the third attempt starts before that."""
    cuts = [(1, 5), (1, 6), (2, 4)]
    sample, asked = await _attempts(shipped_tokenizer, "numbering", *cuts, resumable="replay")
    facts, lengths = sample.metadata["strands_rollout"], [len(ids_of(shipped_tokenizer, text)) for text in TURNS]
    assert (sample.status.value, facts["error"], asked) == ("completed", None, [2, 1, 3, 2])
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(lengths[1:])
    assert facts["dropped_sampled_tokens"] == lengths[0] + 5 + 6 + sum(lengths[:2]) + 4
    assert "message 2: the tool results or images differ" in facts["gateway"]["diverged"]
    assert violations(sample) == []


async def test_replay_restarts_for_a_request_before_the_record(shipped_tokenizer):
    cuts = [(1, 5), (1, 6)]
    sample, asked = await _attempts(shipped_tokenizer, "numbering", *cuts, resumable="replay")
    facts, lengths = sample.metadata["strands_rollout"], [len(ids_of(shipped_tokenizer, text)) for text in TURNS]
    assert (sample.status.value, facts["error"], asked) == ("completed", None, [2, 1, 3])
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(lengths)
    assert facts["dropped_sampled_tokens"] == lengths[0] + 5 + 6
    assert facts["gateway"]["diverged"] == "got 1 messages, for which the record has no answer"
    assert violations(sample) == []


@pytest.mark.parametrize("cut", [(0, 0), (0, 5), (1, 5)])
async def test_replay_continues_after_a_side_conversation(shipped_tokenizer, cut):
    sample, asked = await _attempts(shipped_tokenizer, "titled", cut, resumable="replay")
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["gateway"]["diverged"], asked) == ("completed", "", [cut[0] + 2, 4 - cut[0]])
    assert sum(sample.loss_mask) == sum(len(ids_of(shipped_tokenizer, text)) for text in TURNS)


@pytest.mark.parametrize("cut", [0, 3, None])
@pytest.mark.parametrize("has_title_again", [True, False])
async def test_replay_makes_a_late_agent_the_main_conversation(shipped_tokenizer, cut, has_title_again):
    """The abort comes after `cut` tokens of the title, or after the title if `cut` is None."""
    flag, title = _Flag(), ids_of(shipped_tokenizer, "A title.<|im_end|>")
    is_first, tokens = True, 0

    def script(body: dict[str, Any], _number: int) -> Reply:
        nonlocal tokens
        text = shipped_tokenizer.decode(body["input_ids"])
        begun = text.rpartition("<|im_start|>assistant\n")[2]
        if "A title for" not in text:
            reply = Reply.tokens(ids_of(shipped_tokenizer, TURNS[text.count("is done\n</tool_response>")]))
        elif is_first and cut is not None:
            flag.is_up = True
            reply = Reply.abort(title[:cut])
        else:
            reply = Reply.tokens(title[len(ids_of(shipped_tokenizer, begun)) if begun else 0 :])
            flag.is_up = is_first
        tokens += len(reply.ids)
        return reply

    sample = Sample(prompt="What is 17 * 2?", label="34", index=0)
    for program in ("titled_slowly", "titled" if has_title_again else "chat"):
        flag.is_up = False
        async with FakeSGLang(script, context_length=8192) as fake:
            given = {"agent_program": f"programs.{program}", "should_abort": flag, "resumable": "replay"}
            settings = {**given, "fan_out": False}
            args = args_for(fake.base_url, shipped_tokenizer, strands_rollout=settings, partial_rollout=True)
            sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096})
        is_first = False
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["turns"], facts["tool_calls"], len(facts["calls"])) == ("completed", 3, 2, 2)
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(len(ids_of(shipped_tokenizer, t)) for t in TURNS)
    assert facts["sampled_tokens"] + facts["dropped_sampled_tokens"] == tokens
    assert violations(sample) == []


@pytest.mark.parametrize(
    ("program", "cut"), [("dated", (0, 5)), ("retooling", (1, 5)), ("retooling", (2, 4)), ("retooling_anew", (2, 4))]
)
async def test_replay_restarts_for_another_system_prompt_or_tools(shipped_tokenizer, program, cut):
    sample, asked = await _attempts(shipped_tokenizer, program, cut, resumable="replay")
    facts, lengths = sample.metadata["strands_rollout"], [len(ids_of(shipped_tokenizer, text)) for text in TURNS]
    assert (sample.status.value, facts["dropped_sampled_tokens"]) == ("completed", sum(lengths[: cut[0]]) + cut[1])
    trained = lengths[:1] if program == "dated" else lengths[1:]
    assert sum(sample.loss_mask) == facts["sampled_tokens"] == sum(trained)
    assert facts["gateway"]["diverged"] == "the system prompt or the tools differ"
    assert asked == [cut[0] + 1, len(trained)]
    assert len(facts["calls"]) == len(trained) - 1
    assert violations(sample) == []


async def test_replay_restart_counts_calls_with_reused_ids(
    shipped_tokenizer,
):
    sample, _ = await _attempts(shipped_tokenizer, "changing", (2, 4), resumable="replay")
    facts = sample.metadata["strands_rollout"]
    assert "message 0" in facts["gateway"]["diverged"]
    assert [(call["tool"], call["status"]) for call in facts["calls"]] == [("add", "success")] * 2


async def _said_again(tokenizer: Any, program: str, cut: int | None, most: int) -> tuple[Any, int]:
    """Play at most `most` user turns; return the sample and the request count.

    If `cut` is given, request number `cut` (from 1) is aborted, and the episode is resumed once.
    """
    flag, answer, asked = _Flag(), ids_of(tokenizer, TURNS[-1]), 0

    def script(_body: dict[str, Any], _number: int) -> Reply:
        nonlocal asked
        asked += 1
        flag.is_up = asked == cut
        at = 3 if cut is not None and asked == cut + 1 else 0
        return Reply.abort(answer[:3]) if flag.is_up else Reply.tokens(answer[at:])

    sample = Sample(prompt="What is 17 * 2?", label="34", index=0)
    for _ in range(2 if cut else 1):
        flag.is_up = False
        async with FakeSGLang(script, context_length=8192) as fake:
            given = {"agent_program": f"programs.{program}", "should_abort": flag, "resumable": "replay"}
            settings = {**given, "max_user_turns": most}
            args = args_for(fake.base_url, tokenizer, strands_rollout=settings, partial_rollout=True)
            sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 4096})
    return sample, asked


@pytest.mark.parametrize("cut", [None, 1, 2])
@pytest.mark.parametrize("most", [1, 2])
async def test_replay_counts_user_turns_of_all_attempts(shipped_tokenizer, cut, most):
    sample, asked = await _said_again(shipped_tokenizer, "twice", cut, most)
    facts = sample.metadata["strands_rollout"]
    reason = "max_user_turns" if most == 1 else "completed"
    assert (facts["stop_reason"], facts["user_turns"], facts["turns"]) == (reason, most, 1 + most)
    assert asked == 1 + most + (cut is not None)


@pytest.mark.parametrize("cut", [(1, 5), (2, 4)])
async def test_replay_keeps_repeated_turns_of_a_program_ending_early(shipped_tokenizer, cut):
    sample, asked = await _attempts(shipped_tokenizer, "giving_up", cut, resumable="replay")
    facts, lengths = sample.metadata["strands_rollout"], [len(ids_of(shipped_tokenizer, text)) for text in TURNS]
    assert (sample.status.value, facts["error"], asked) == ("completed", None, [cut[0] + 1, 0])
    assert (facts["turns"], sum(sample.loss_mask), facts["sampled_tokens"]) == (1, lengths[0], lengths[0])
    assert facts["dropped_sampled_tokens"] == sum(lengths[1 : cut[0]]) + cut[1]
    assert facts["gateway"]["diverged"] == "the program ended after message 1, before the end of the record"
    assert (facts["tool_calls"], facts["calls"]) == (1, [])
    assert violations(sample) == []


async def test_replay_of_a_program_without_requests_fails(shipped_tokenizer):
    sample, _ = await _attempts(shipped_tokenizer, "asking_once", (0, 5), resumable="replay")
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["dropped_sampled_tokens"]) == ("failed", 5)
    assert "ended without an answer of the policy" in facts["error"]
    assert violations(sample) == []


async def test_replay_restarts_for_more_messages_at_an_open_turn(shipped_tokenizer):
    sample, asked = await _attempts(shipped_tokenizer, "adding", (0, 5), resumable="replay")
    facts = sample.metadata["strands_rollout"]
    assert (sample.status.value, facts["error"], asked) == ("completed", None, [1, 3])
    assert sum(sample.loss_mask) == sum(len(ids_of(shipped_tokenizer, text)) for text in TURNS)
    assert facts["dropped_sampled_tokens"] == 5
    assert facts["gateway"]["diverged"] == "message 1: got 1 more message after a turn that was interrupted"
    assert violations(sample) == []


LINES = """
import json, os, sys, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"messages": [{"role": "user", "content": sys.argv[1] + sys.stdin.read()}]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


async def test_agent_command_plays_an_episode(shipped_tokenizer, monkeypatch):
    monkeypatch.setenv("SECRET_OF_THE_TRAINER", "hidden")
    inherited = "import os; inherited = [n for n in range(3, 99) if os.path.exists(f'/proc/self/fd/{n}')]"
    own = "os.environ.get('SECRET_OF_THE_TRAINER'), os.environ['OWN'], os.getcwd() == os.environ['HOME']"
    code = f"{inherited}{LINES}print({own}, inherited)"
    command = {
        "command": "python -c",
        "args": [code, "{prompt}"],
        "stdin": " Say {prompt}",
        "env": {"OWN": "${SECRET_OF_THE_TRAINER}-{model}"},
    }
    played = await run(shipped_tokenizer, TURNS[-1:], settings={"agent_command": command})
    assert (played.sample.status.value, played.facts["error"]) == ("completed", None)
    assert "What is 17 * 2? Say What is 17 * 2?" in played.decode(played.sample.tokens)
    process = played.facts["gateway"]["process"]
    assert process["output"].endswith("The answer is \\boxed{34}.\nNone hidden-policy True []")
    assert (process["exit_code"], process["escaped"]) == (0, 0)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ({"command": "no-such-command {prompt}"}, "agent_command can't start 'no-such-command'"),
        ({"command": "python -c", "args": ["print('why'); exit(3)", "{prompt}"]}, "exit code 3"),
        ({"command": "python -c pass {prompt}", "exit_codes": [3]}, "exit code 0; expected 3. The end of its output: "),
        ({"command": "python -c exit(3) {prompt}", "exit_codes": [0, 3]}, "ended without an answer of the policy"),
        ({"command": "python -c pass {prompt}", "cwd": "/no/such/folder"}, "can't start"),
    ],
)
async def test_agent_command_failure_fails_the_sample(shipped_tokenizer, command, words):
    played = await run(shipped_tokenizer, [], settings={"agent_command": command})
    assert (played.facts["stop_reason"], played.sample.status.value) == ("setup_error", "failed")
    assert words in played.facts["error"]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
async def test_agent_command_kills_escaped_processes(shipped_tokenizer):
    escape = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
    command = {"command": "python -c", "args": [LINES + escape, "{prompt}"], "stdin": ""}
    played = await run(shipped_tokenizer, TURNS[-1:], settings={"agent_command": command})
    assert played.facts["gateway"]["process"]["escaped"] == 1
    assert played.sample.status.value == "completed"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"agent_program": "programs.chat", "agent_factory": "programs.chat"}, "agent_factory and agent_program"),
        ({"agent_program": "programs.chat", "hooks": ["x.y"]}, "no hooks, which agent_program ignores"),
        ({"resumable": "replay"}, "no resumable, which is for agent_program"),
        ({"agent_command": "claude -p"}, "expected: {prompt} or {task} in the command"),
        ({"agent_program": "programs.no_such"}, "no attribute 'no_such'"),
    ],
)
async def test_program_settings_that_contradict_are_refused(shipped_tokenizer, settings, words):
    played = await run(shipped_tokenizer, [], settings=settings)
    assert words in played.facts["error"]


@pytest.mark.parametrize("then", ["continue", "return"])
async def test_program_turn_across_a_weight_update(shipped_tokenizer, then):
    turn = ids_of(shipped_tokenizer, TURNS[-1])
    replies = [Reply.abort(turn[:4]), Reply.tokens(turn[4:])]
    settings = {"agent_program": "recorded_tools.program", "on_engine_abort": then}
    played = await run(shipped_tokenizer, replies, settings=settings)
    goes_on = then == "continue"
    kept = turn if goes_on else turn[:4]
    assert played.sample.tokens[played.prompt_length :] == kept
    assert played.sample.status.value == ("completed" if goes_on else "aborted")
    assert (played.facts["turns"], played.facts["engine_aborts"]) == (1, goes_on)
    assert len(played.fake.requests) == 1 + goes_on
    assert played.fake.requests[0].key == played.fake.requests[-1].key


async def test_program_with_fan_out_has_a_sample_per_conversation(shipped_tokenizer):
    settings = {"agent_program": "programs.titled", "fan_out": True}
    played = await run(shipped_tokenizer, ["A title.<|im_end|>", *TURNS], settings=settings)
    kinds = [one.metadata["strands_rollout"]["fan_out"]["kind"] for one in played.sample]
    assert kinds == ["main", "aside"]
    assert [sum(one.loss_mask) for one in played.sample] == [
        sum(len(ids_of(shipped_tokenizer, turn)) for turn in TURNS),
        len(ids_of(shipped_tokenizer, "A title.<|im_end|>")),
    ]
