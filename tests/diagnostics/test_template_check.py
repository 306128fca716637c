"""`strands-rollout check-template`: each rule is checked separately, and a broken rule shows the tokens around it."""

import json
from pathlib import Path
from typing import Any

import pytest
from family_templates import TEMPLATES, tokenizer_with
from typer.testing import CliRunner

from strands_rollout.cli.commands import app
from strands_rollout.diagnostics import Finding
from strands_rollout.diagnostics.template_check import check_template
from strands_rollout.engine import SHIPPED_MODEL_DIR

PLAIN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALL = {"renders tools", "renders results", "text beside calls", "tool results", "several calls", "user turns", "calls"}
TOOL_TURNS = {"tool results", "several calls"}


def checked(tokenizer: Any, **options: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_template("nowhere", tokenizer, **options)}


def broken(found: dict[str, Finding]) -> set[str]:
    """Return the broken rules except "end of turn", which a copy of another model's tokenizer can't follow."""
    return {name for name, finding in found.items() if finding.status == "error"} - {"end of turn"}


def test_check_template_passes_real_templates(tokenizer: Any) -> None:
    found = checked(tokenizer)
    assert found.keys() >= ALL
    assert broken(found) == set()
    assert "<|im_end|>" in found["end of turn"].found
    assert found["calls"].facts == {"tool_parser": "hermes"}
    assert found["reasoning"].facts == {
        "opens_reasoning": False,
        "earlier_reasoning": {"after a tool result": "kept", "after a user turn": "dropped"},
    }


def test_check_template_needs_every_end_of_turn_as_stop(shipped_tokenizer: Any) -> None:
    tokenizer = tokenizer_with(TEMPLATES["gpt_oss"][1], shipped_tokenizer)
    tokenizer.eos_token_id = tokenizer.convert_tokens_to_ids("<|end|>")
    found = checked(tokenizer)["end of turn"]
    assert (found.status, "'<|call|>', but the end-of-sequence ids are" in found.found) == ("error", True)


@pytest.mark.parametrize(
    ("old", "new", "rules"),
    [
        ("m.content +", "m.content + ('!' if loop.last else '') +", {"user turns", *TOOL_TURNS}),
        ("m.role +", "(m.role if m.role != 'tool' else loop.index | string) +", TOOL_TURNS),
    ],
    ids=["last message marked", "results numbered"],
)
def test_check_template_names_only_the_broken_rules(old, new, rules, shipped_tokenizer) -> None:
    assert old in PLAIN
    found = checked(shipped_tokenizer, chat_template=PLAIN.replace(old, new))
    assert broken(found) - {"calls"} == rules


def test_check_template_failing_episode_repeats_by_seed(shipped_tokenizer: Any) -> None:
    late = TEMPLATES["hermes"][1].replace(
        "<tool_response>\n{{ message.content", "<tool_response>\n{{ message.content[: 2 if loop.index > 8 else none]"
    )
    rules = checked(shipped_tokenizer, chat_template=late, episodes=50)
    assert broken(rules) == {"random episodes"}
    found, failed = rules["random episodes"], rules["random episodes"].facts["failed_episode"]
    assert f"seed {failed['seed']}, " in found.found
    assert len(failed["messages"]) > 8
    assert failed["messages"][-1]["role"] == "tool"
    assert found.facts["random_episodes_difference"]["position"] > 0
    again = checked(shipped_tokenizer, chat_template=late, episodes=1, seed=failed["seed"])
    assert again["random episodes"] == found


def test_check_template_episodes_leave_out_refused_messages(shipped_tokenizer: Any) -> None:
    no_system = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + PLAIN
    found = checked(shipped_tokenizer, chat_template=no_system, episodes=3)["random episodes"]
    assert (found.status, found.facts["random_episodes"]["without"]) == ("ok", ["system messages", "calls"])
    assert "played without system messages: the chat template fails on messages of roles ['system'" in found.found


def test_check_template_refuses_an_unusable_template(shipped_tokenizer: Any) -> None:
    picky = "{% if messages | length == 1 %}{{ raise_exception('two at least') }}{% endif %}" + PLAIN
    for source, words in ((PLAIN.replace("<|im_end|>", ""), "expected a control token"), (picky, "two at least")):
        (found,) = check_template("nowhere", shipped_tokenizer, chat_template=source, episodes=1)
        assert (found.status, words in found.found) == ("error", True)


def test_check_template_command_exit_codes(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(PLAIN.replace("m.content +", "m.content + ('!' if loop.last else '') +"))
    right = CliRunner().invoke(app, ["check-template", str(SHIPPED_MODEL_DIR), "--json"])
    wrong = CliRunner().invoke(app, ["check-template", str(SHIPPED_MODEL_DIR), "--chat-template", str(file), "--json"])
    by_name = CliRunner().invoke(app, ["check-template", str(SHIPPED_MODEL_DIR), "--chat-template", "hermes_tools"])
    unknown = CliRunner().invoke(app, ["check-template", str(SHIPPED_MODEL_DIR), "--chat-template", "no_tools"])
    assert (by_name.exit_code, "package: deepseek_r1_tools, " in str(unknown.exception)) == (0, True)
    file.write_bytes(b"\xff")
    binary = CliRunner().invoke(app, ["check-template", str(SHIPPED_MODEL_DIR), "--chat-template", str(file)])
    assert "expected a UTF-8 file" in str(binary.exception)
    told = json.loads(right.stdout)
    assert (right.exit_code, told["ok"], told["tool_parser"]) == (0, True, "hermes")
    assert (told["random_episodes"]["count"], told["random_episodes"]["without"]) == (20, [])
    assert (wrong.exit_code, json.loads(wrong.stdout)["user_turns_difference"]["position"] > 0) == (1, True)
    none = CliRunner().invoke(app, ["check-template", str(tmp_path)])
    assert "no tokenizer.json" in str(none.exception)
