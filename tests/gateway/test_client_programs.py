"""Unmodified agents on Node: each fixes a file in a folder of its own, with the policy as its model."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import Reply
from harness import ids_of, run
from run_report import note_engine

pytestmark = pytest.mark.real

REPOSITORY = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("STRANDS_ROLLOUT_NODE_CLIENTS", REPOSITORY / ".node-clients")) / "node_modules"
AGENT = Path(__file__).with_name("strands_agent.mjs")
PROMPT = "Mend calc.py, run it, and say that it works."
RUN = "python3 -c 'import calc; print(calc.add(1, 2))'"
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Client:
    """Command line of an agent, and the calls of its tools that read the file, edit it, and run it."""

    args: tuple[str, ...]
    look: Callable[[str], list[Call]]
    edit: Callable[[str], Call]
    run: Call
    command: str = "node"
    env: dict[str, str] = field(default_factory=dict)
    asides: int = 0  # number of requests in side conversations

    def turns(self, path: str) -> list[str]:
        return [
            _turn("I look at it.", *self.look(path), reasoning="It must be read first."),
            _turn("", self.edit(path), reasoning="A minus."),
            _turn("Now I run it.", self.run),
            _turn("", ("no_such_tool", {"x": 1})),
            _turn("It works.", reasoning="3, as it should be."),
            _turn("Yes, I am."),
        ]


def _turn(text: str, *calls: Call, reasoning: str = "") -> str:
    head = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    written = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join([head + text, *(f"<tool_call>\n{call}\n</tool_call>" for call in written)]) + "<|im_end|>"


def _claude() -> Client:
    return Client(
        ("-p", "{prompt}", "--output-format", "json", "--dangerously-skip-permissions"),
        lambda path: [("Read", {"file_path": path}), ("Bash", {"command": f"cd {Path(path).parent} && ls"})],
        lambda path: ("Edit", {"file_path": path, "old_string": "a - b", "new_string": "a + b  "}),
        ("Bash", {"command": RUN, "timeout": "5000"}),
        str(CLIENTS / ".bin" / "claude"),
        # as root, Claude Code skips permission checks only in a sandbox
        {"IS_SANDBOX": "1", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
    )


def _codex() -> Client:
    provider = '{name="policy",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
    return Client(
        (
            *("exec", "-c", 'model_provider="policy"', "-c", f"model_providers.policy={provider}", "-m", "{model}"),
            *(
                "-c",
                'web_search="disabled"',
                "--dangerously-bypass-approvals-and-sandbox",
                "--skip-git-repo-check",
                "--ephemeral",
                "{prompt}",
            ),
        ),
        lambda path: [("exec_command", {"cmd": f"cat {path}"}), ("exec_command", {"cmd": "ls"})],
        lambda path: ("exec_command", {"cmd": f"sed -i 's/a - b/a + b/' {path}"}),
        ("exec_command", {"cmd": RUN}),
        str(CLIENTS / ".bin" / "codex"),
    )


def _opencode(package: str) -> Client:
    options = {"baseURL": "{base_url}", "apiKey": "{api_key}"}
    models = {"policy": {"limit": {"context": 200000, "output": 32000}, "reasoning": True}}
    provider = {"npm": f"@ai-sdk/{package}", "name": "policy", "options": options, "models": models}
    config = {"provider": {"policy": provider}, "permission": "allow", "autoupdate": False, "share": "disabled"}
    off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")
    return Client(
        ("run", "-m", "policy/policy", "{prompt}"),
        lambda path: [("read", {"filePath": path}), ("bash", {"command": "ls", "description": "Lists."})],
        lambda path: ("edit", {"filePath": path, "oldString": "a - b", "newString": "a + b"}),
        ("bash", {"command": RUN, "description": "Runs it."}),
        str(CLIENTS / ".bin" / "opencode"),
        {"OPENCODE_CONFIG_CONTENT": json.dumps(config), **{f"OPENCODE_DISABLE_{name}": "1" for name in off}},
        asides=1,  # the request for a title
    )


def _strands(api: str) -> Client:
    return Client(
        ("strands_agent.mjs", api, "{prompt}", "Are you sure?"),
        lambda path: [
            ("fileEditor", {"command": "view", "path": path}),
            ("bash", {"mode": "execute", "command": "ls"}),
        ],
        lambda path: ("fileEditor", {"command": "str_replace", "path": path, "old_str": "a - b", "new_str": "a + b"}),
        ("bash", {"mode": "execute", "command": RUN}),
    )


CASES = {
    "@anthropic-ai/claude-code": _claude(),
    "@openai/codex": _codex(),
    **{f"opencode-ai on {name}": _opencode(name) for name in ("openai-compatible", "openai", "anthropic")},
    **{f"@strands-agents/sdk on {api}": _strands(api) for api in ("chat", "responses", "responses_by_id", "messages")},
}


@pytest.mark.parametrize("name", CASES)
async def test_node_agent_is_one_sample_with_each_token(
    name: str, tmp_path: Path, shipped_tokenizer: Any, report_row: Any, request: pytest.FixtureRequest
) -> None:
    client, package = CASES[name], CLIENTS / name.partition(" ")[0]
    if not package.is_dir():
        pytest.skip(f"needs {package}: bash scripts/gateway_clients.sh install")
    version = json.loads((package / "package.json").read_text())["version"]
    note_engine(request.node, f"{name} {version}")
    file = tmp_path / "calc.py"
    file.write_text("def add(a, b):\n    return a - b\n")
    (tmp_path / AGENT.name).write_text(AGENT.read_text())
    (tmp_path / "node_modules").symlink_to(CLIENTS)
    turns, played, asides = iter(client.turns(str(file))), list[Reply](), 0

    def reply(body: dict[str, Any], _number: int) -> Reply:
        nonlocal asides
        is_aside = "<tools>" not in shipped_tokenizer.decode(body["input_ids"])
        turn = Reply.tokens(ids_of(shipped_tokenizer, "Mending calc.py<|im_end|>" if is_aside else next(turns)))
        asides += is_aside
        played.extend([] if is_aside else [turn])
        return turn

    result = await run(
        shipped_tokenizer,
        reply,
        prompt=PROMPT,
        params={"max_new_tokens": 200_000},
        settings={
            "agent_command": {"command": client.command, "args": client.args, "env": client.env, "cwd": str(tmp_path)},
            "max_tool_iterations": None,
            "episode_timeout_s": 240,
        },
        context_length=500_000,
        episode_of=lambda _request: None,  # episodes are found by tokens, since side conversations use the same key
    )
    facts = result.facts["gateway"]
    assert (result.facts["error"], result.facts["stop_reason"], facts["refused"]) == (None, "completed", {})
    assert result.fake.violations == []
    assert (facts["forks"], facts["repeats"], asides) == (0, 0, client.asides), facts["differences"]
    assert "return a + b\n" in file.read_text()
    assert result.decode(result.sample.tokens).count(PROMPT) == 1
    response = result.sample.tokens[result.prompt_length :]
    trained = [token for token, mask in zip(response, result.sample.loss_mask, strict=True) if mask]
    assert trained == list(chain.from_iterable(one.ids for one in played))
    counts = {key: facts[key] for key in ("requests", "forks", "changed_calls")}
    report_row("agents on Node", agent=name, **counts, turns=len(played), asides=asides, tokens=len(trained))
