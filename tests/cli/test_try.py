"""`strands-rollout try`: turns from a script, a person, an API and a server; errors, limits, and the next command."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import Result
from engine_thread import run_on_thread
from fake_sglang import FakeSGLang, Reply
from family_templates import CHATML, tokenizer_with
from harness import TOOL_CALL, ids_of
from typer.testing import CliRunner

from strands_rollout.cli.commands import app

TOOLS = '''
from strands import tool

@tool
def lookup(item: str) -> str:
    """Price of an item.

    Args:
        item: Its name.
    """
    return {"apple": "3 coins"}[item]
'''
GRAPH = """
from strands import Agent
from strands.multiagent import GraphBuilder

def build(model, task):
    builder = GraphBuilder().set_max_node_executions(5)
    for name in ("owner", "clerk", "cook"):
        builder.add_node(Agent(name=name, model=model, system_prompt=f"You are the {name}."), name)
    builder.add_edge("owner", "clerk")
    builder.add_edge("owner", "cook", condition=lambda state: False)
    return builder.build()
"""
CALL = {"name": "lookup", "arguments": {"item": "apple"}}
RAW = TOOL_CALL.format(name="lookup", arguments='{"item": "pear"}')
TURNS = [{"text": "I look.", "calls": [CALL, {"name": "nosuch"}]}, RAW, "An apple is \\boxed{3} coins.\n"]
ASKED = """ system | You keep a shop.
  tools | lookup(item)
   user | What does an apple cost?
"""
PLAYED = (
    ASKED
    + """ policy | I look.
   call | lookup {"item": "apple"}
   call | nosuch {}
 result | 3 coins
  error | Unknown tool: nosuch
   call | lookup {"item": "pear"}
  error | Error: KeyError - 'pear'
 raised | FOLDER/shop_of_try.py, line 11, in lookup
 policy | An apple is \\boxed{3} coins.

 reward | score 1, acc 1, pred 3, label 3, method exact
 status | completed (completed); turns: 3, tool calls: 3, tool errors: 2
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shop_of_try.py").write_text(TOOLS)
    settings = "system_prompt: You keep a shop.\n  tools: [shop_of_try.lookup]"
    (tmp_path / "rollout.yaml").write_text(f"strands_rollout:\n  {settings}\n")
    (tmp_path / "train.jsonl").write_text('{"prompt": "What does an apple cost?", "label": "3"}\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "shop_of_try", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def play(*arguments: str, typed: str = "") -> Result:
    return CliRunner().invoke(app, ["try", "rollout.yaml", *arguments], input=typed)


def script(folder: Path, turns: object) -> str:
    (folder / "turns.yaml").write_text(json.dumps(turns))
    return "turns.yaml"


def test_try_plays_a_script_with_tools_tokens_and_reward(folder: Path) -> None:
    done = play("--script", script(folder, TURNS), "--tokens")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(PLAYED.replace("FOLDER", str(folder))), done.stdout
    assert '  trained | I look.\n          | <tool_call>\n          | {"name": "lookup"' in done.stdout
    assert done.stderr.startswith("row 0 of train.jsonl\n")


@pytest.mark.parametrize(
    ("turns", "arguments", "words"),
    [
        (TURNS[:1], [], "turns.yaml ends too early: the episode continues, and turn 2 of the policy is missing"),
        (["hi", "more"], [], "it has 2 turns, and the episode ended after turn 1 (completed)"),
        ("hi", [], "turns.yaml holds str; expected a list of turns, each a text or {text:"),
        ([], [], "turns.yaml holds nothing; expected a list of turns"),
        ([42], [], "turn 1: got 42; expected: a mapping with the keys text, calls"),
        (
            [{"calls": [{"name": "lookup", "args": {}}]}],
            [],
            "got the unknown key calls.0.args; did you mean 'arguments'?",
        ),
        (["hi", {"txt": "hi"}], [], "turn 2: got the unknown key txt; did you mean 'text'?"),
        (["hi"], ["--row", "1"], "got --row 1; expected an index from 0 to 0 (train.jsonl has 1 row)"),
        (["hi"], ["--you"], "got --script, --you; expected only one of them"),
        (["hi"], ["--api-model", "x"], "got only one of --api-base and --api-model; expected both or neither"),
    ],
)
def test_try_error_names_the_bad_turn_or_option(folder: Path, turns: object, arguments: list[str], words: str) -> None:
    done = play("--script", script(folder, turns), *arguments)
    assert done.exit_code != 0
    assert words in f"{done.output} {done.exception}"


def test_try_error_says_how_to_write_calls_that_the_template_lacks(folder: Path, shipped_tokenizer: Any) -> None:
    own = tokenizer_with(CHATML.replace("CALL", ""), shipped_tokenizer)
    own.save_pretrained(folder / "own")
    done = play("--script", script(folder, TURNS), "--tokenizer", "own", "--set", "tool_parser=hermes")
    assert done.exit_code == 1
    assert "the chat template can't render tool calls; write them into the turn's text" in str(done.exception)


@pytest.mark.parametrize(
    ("turns", "change", "shown"),
    [
        (2, "max_tool_iterations=1", "error | Not run: the limit max_tool_iterations of"),
        (2, "max_tool_calls=1", " limit | Stopped: the limit max_tool_calls of"),
        (1, "max_turn_tokens=5", " error | MaxTokensReachedException: the turn was cut at its limit of tokens"),
    ],
)
def test_try_limit_truncates_and_stays_in_the_next_command(folder, turns, change, shown):
    (folder / "own.py").write_text("def score(response, label): return 1.0\n")
    done = play("--script", script(folder, [{"calls": [CALL]}] * turns), "--set", change, "--reward", "own.score")
    assert (done.exit_code, shown in done.stdout, " status | truncated" in done.stdout) == (0, True, True), (
        f"{done.output} {done.exception!r}"
    )
    assert done.stderr.endswith(f" eval --config rollout.yaml --reward own.score --set {change}\n")


def test_try_names_its_data_in_the_next_command(folder: Path) -> None:
    (folder / "more.jsonl").write_text((folder / "train.jsonl").read_text())
    done = play("--script", script(folder, ["An apple is \\boxed{3} coins."]), "--data", "more.jsonl")
    assert done.stderr.endswith(" eval --config rollout.yaml --data more.jsonl\n"), done.stderr


def test_try_shows_each_agent_of_a_graph(folder: Path) -> None:
    (folder / "graph_of_try.py").write_text(GRAPH)
    done = play(
        "--script", script(folder, ["Ask the clerk.", "\\boxed{3}"]), "--set", "agent_factory=graph_of_try.build"
    )
    assert done.exit_code == 0, done.output
    for words in (" system | You are the clerk.", "  agent | clerk", "pred 3, label 3, method exact"):
        assert words in done.stdout, done.stdout
    assert " status | completed (completed); turns: 1" in done.stdout, done.stdout


def test_try_exits_with_1_when_no_turn_was_played(folder: Path, shipped_tokenizer: Any) -> None:
    with run_on_thread(FakeSGLang([], context_length=9)) as fake:
        done = play("--base-url", fake.base_url, "--tokenizer", shipped_tokenizer.name_or_path)
    assert (done.exit_code, " status | truncated (prompt_too_long)" in done.stdout) == (1, True), done.output


def test_try_scores_csv_rows_with_a_given_reward(folder: Path) -> None:
    (folder / "rows.csv").write_text("question,answer\nWhat does an apple cost?,3\n")
    (folder / "shop_rewards.py").write_text(
        "def short(response, label): return len(response) < 9\ndef word(_a, _b): return 'good'\n"
    )
    table = ["--data", "rows.csv", "--input-key", "question", "--label-key", "answer"]
    done = play("--script", script(folder, ["3."]), *table, "--reward", "./shop_rewards.py:short")
    assert (done.exit_code, "score 1, acc 1, label 3, method function" in done.stdout) == (0, True), done.output
    done = play("--script", "turns.yaml", *table, "--reward", "./shop_rewards.py:word")
    assert (done.exit_code, "word is 'good'; expected a finite `score`" in done.stdout) == (1, True), done.output


def test_try_with_turns_typed_by_a_person(folder: Path) -> None:
    call = '/call lookup {"item": "apple"}'
    done = play("--you", typed=f"\n/call lookup 3\nI look.\\\n{call}\n{call}\nAn apple is \\boxed{{3}} coins.\n")
    assert done.exit_code == 0, done.output
    assert """got '/call lookup 3'; expected /call NAME {"key": "value"}""" in done.stderr
    assert ' policy | I look.\n   call | lookup {"item": "apple"}\n result | 3 coins\n' in done.stdout
    assert "turns: 3, tool calls: 2, tool errors: 0" in done.stdout
    left = play("--you", typed=call + "\n")
    assert (left.exit_code, "Traceback" in left.output) == (130, False)
    assert "the input at the terminal ended before the episode did" in left.stderr


@asynccontextmanager
async def chat_api(seen: list[Any], arguments: str = '{"item": "apple"}') -> AsyncIterator[str]:
    """Serve an OpenAI-compatible API that calls a tool with `arguments`, then answers; it demands the key `k`."""

    async def complete(request: web.Request) -> web.Response:
        seen.append(await request.json())
        if request.headers.get("Authorization") != "Bearer k":
            return web.json_response({"error": "no key"}, status=401)
        call = {"id": "a", "type": "function", "function": {"name": "lookup", "arguments": arguments}}
        answers = [{"content": None, "tool_calls": [call]}, {"content": "\\boxed{3}"}]
        return web.json_response({"choices": [{"message": answers[len(seen[-1]["messages"]) > 2]}]})

    api = web.Application()
    api.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(api)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    await runner.cleanup()


def test_try_with_an_openai_compatible_api(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with run_on_thread(chat_api(seen)) as url:
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        done = play("--api-base", url, "--api-model", "m")
        monkeypatch.delenv("OPENAI_API_KEY")
        refused = play("--api-base", url, "--api-model", "m")
    assert done.exit_code == 0, done.output
    assert " reward | score 1" in done.stdout
    assert " tokens | none: an API returns text only" in done.stdout
    roles = [[message["role"] for message in body["messages"]] for body in seen[:2]]
    assert roles == [["system", "user"], ["system", "user", "assistant", "tool"]]
    assert seen[1]["messages"][2]["tool_calls"][0]["function"]["arguments"] == '{"item": "apple"}'
    assert seen[0]["tools"][0]["function"]["name"] == "lookup"
    assert "answered 401" in str(refused.exception)
    assert "OPENAI_API_KEY is not set" in str(refused.exception)
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    with run_on_thread(chat_api(seen, "{not json")) as url:
        odd = play("--api-base", url, "--api-model", "m")
    assert "the API's call of lookup has the arguments '{not json'; expected a JSON object" in str(odd.exception)


def test_try_shows_only_the_error_when_the_setup_fails(folder: Path) -> None:
    (folder / "broken.py").write_text("def build(model, task):\n    raise RuntimeError('no agent')\n")
    done = play("--script", script(folder, ["hi"]), "--set", "agent_factory=broken.build")
    assert (done.exit_code, done.stdout.count("no agent"), "reward" in done.stdout) == (1, 1, False), done.output


@pytest.mark.parametrize(("more", "is_warned"), [("", True), (", system_prompt: Buy.", False)])
def test_config_warns_when_the_default_prompt_lacks_its_tool(folder: Path, more: str, is_warned: bool) -> None:
    (folder / "rollout.yaml").write_text(f"strands_rollout: {{tools: [shop_of_try.lookup]{more}}}")
    shown = CliRunner().invoke(app, ["config", "rollout.yaml"]).output
    assert ("system_prompt is the default, which mentions execute_python_code" in shown) is is_warned


def test_try_with_a_servers_model(folder: Path, shipped_tokenizer: Any) -> None:
    replies = [Reply.tokens(ids_of(shipped_tokenizer, turn)) for turn in (RAW, "It is \\boxed{3}.<|im_end|>")]
    with run_on_thread(FakeSGLang(replies)) as fake:
        done = play("--base-url", fake.base_url, "--tokenizer", shipped_tokenizer.name_or_path)
    assert done.exit_code == 0, done.output
    assert ASKED + '   call | lookup {"item": "pear"}\n' in done.stdout
    named = f"--base-url {fake.base_url} --tokenizer {shipped_tokenizer.name_or_path}"
    assert done.stderr.endswith(f" eval --config rollout.yaml {named}\n")
    assert fake.violations == []
