"""strands-agents-evals in an episode: a simulated user, simulated tools and faults, as docs/environments.md has it."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run
from strands.models import Model

pytest.importorskip("strands_evals")
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
LOOKS = TOOL_CALL.format(name="look_up", arguments=json.dumps({"item": "apple"}))


class Simulating(Model):
    """Fills the form that it is asked for; a form's text is what it was asked last."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def update_config(self, **_config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, tool_specs: Any = None, *_: Any, **__: Any) -> AsyncIterator[Any]:
        said = " ".join(block["text"] for block in messages[-1]["content"] if "text" in block)
        self.asked.append(said)
        form = next((spec for spec in tool_specs or () if spec["name"].startswith(("Actor", "Default"))), None)
        is_filled = any("toolResult" in block for block in messages[-1]["content"])
        yield {"messageStart": {"role": "assistant"}}
        if form is None or is_filled:
            yield {"contentBlockDelta": {"delta": {"text": '{"response": "3 coins"}'}}}
            yield {"contentBlockStop": {}}
            yield {"messageStop": {"stopReason": "end_turn"}}
            return
        answers = {"reasoning": "so", "stop": "34" in said, "message": "And times 2?", "response": "3 coins"}
        filled = {name: answers[name] for name in form["inputSchema"]["json"]["properties"] if name in answers}
        yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "1", "name": form["name"]}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(filled)}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The page's examples as a module, on a model of these tests."""
    section = PAGE.read_text(encoding="utf-8").split("## Simulated users, tools and faults")[1]
    code = "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    code = code.replace("from strands.models.openai import OpenAIModel\n", "from test_simulations import Simulating\n")
    code = re.sub(r"OpenAIModel\(.*?\)\n", "Simulating()\n", code, flags=re.DOTALL)
    (tmp_path / "simulations.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    return str(tmp_path / "simulations.py")


async def test_a_simulated_user_answers_until_its_goal_is_met(shipped_tokenizer: Any, page: str) -> None:
    settings = {"tools": [], "environment": f"{page}:SimulatedUser", "max_user_turns": 5}
    played = await run(shipped_tokenizer, ["It is 17.<|im_end|>", ANSWER], settings=settings)
    assert (played.facts["stop_reason"], played.facts["user_turns"]) == ("completed", 1), played.facts["error"]
    assert "And times 2?" in played.context_after(0)


async def test_simulated_tools_answer_calls(shipped_tokenizer: Any, page: str) -> None:
    played = await run(
        shipped_tokenizer, [LOOKS, ANSWER], settings={"tools": [], "environment": f"{page}:SimulatedTools"}
    )
    assert (played.facts["stop_reason"], played.facts["tool_errors"]) == ("completed", 0), played.facts["error"]
    assert "3 coins" in played.context_after(0)


async def test_faults_are_read_by_the_policy_and_trained_and_are_each_episodes_own(
    shipped_tokenizer: Any, page: str
) -> None:
    from strands_rollout import Sample

    async def play(faulty: bool) -> Any:
        sample = Sample(prompt="What is 17 * 2?", label="34", index=0, metadata={"faulty": faulty})
        settings = {"tools": [], "agent_factory": f"{page}:build"}
        return await run(shipped_tokenizer, [LOOKS, ANSWER], settings=settings, sample=sample)

    for number, played in enumerate(await asyncio.gather(*(play(number % 2 == 0) for number in range(8)))):
        assert played.facts["stop_reason"] == "completed", played.facts["error"]
        assert ("3 coins" in played.context_after(0)) == bool(number % 2)
        assert sum(played.sample.loss_mask) == sum(len(reply.ids) for reply in played.replied)
        assert not played.sample.remove_sample


async def test_a_simulator_without_a_model_fails_the_sample_in_words(shipped_tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "unnamed.py").write_text(
        "from strands import Agent\n\n\n"
        "class User:\n"
        "    def __init__(self, task):\n        self.user = Agent(callback_handler=None)\n\n"
        "    def answer(self, reply):\n        return str(self.user(reply))\n"
    )
    settings = {"tools": [], "environment": f"{tmp_path}/unnamed.py:User"}
    played = await run(shipped_tokenizer, [ANSWER], settings=settings)
    assert played.facts["stop_reason"] == "setup_error"
    assert "Strands would ask Amazon Bedrock" in played.facts["error"]
