"""strands-agents-evals in an episode: the simulated user, simulated tools and faults of docs/environments.md."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from harness import ANSWER, TOOL_CALL, run
from strands.models import Model

from strands_rollout import Sample

pytest.importorskip("strands_evals")
PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
LOOKS = TOOL_CALL.format(name="look_up", arguments=json.dumps({"item": "apple"}))


class Simulating(Model):
    """Model that fills in the form that the simulated user or tool asks for."""

    def update_config(self, **_config: Any) -> None: ...

    def get_config(self) -> dict[str, Any]:
        return {}

    def structured_output(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def stream(self, messages: Any, tool_specs: Any = None, *_: Any, **__: Any) -> AsyncIterator[Any]:
        said = " ".join(block["text"] for block in messages[-1]["content"] if "text" in block)
        form = next(spec for spec in tool_specs if spec["name"].startswith(("Actor", "Default")))
        told = f"{said.count('timestamp')} calls before"
        answers = {"reasoning": "so", "stop": "34" in said, "message": "And times 2?", "response": told}
        filled = {name: answers[name] for name in form["inputSchema"]["json"]["properties"] if name in answers}
        yield {"messageStart": {"role": "assistant"}}
        yield {"contentBlockStart": {"start": {"toolUse": {"toolUseId": "1", "name": form["name"]}}}}
        yield {"contentBlockDelta": {"delta": {"toolUse": {"input": json.dumps(filled)}}}}
        yield {"contentBlockStop": {}}
        yield {"messageStop": {"stopReason": "tool_use"}}


@pytest.fixture
def page(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    """Write the page's examples to a module that uses the `Simulating` model, and return the module's path.

    A parametrized test may replace a text in the examples.
    """
    section = PAGE.read_text(encoding="utf-8").split("## Simulated users, tools and faults")[1]
    code = "from strands_evals import Case\n" + "\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    code = code.replace("from strands.models.openai import OpenAIModel\n", "from test_simulations import Simulating\n")
    old, new = getattr(request, "param", ("", ""))
    assert old in code
    code = re.sub(r"OpenAIModel\(.*?\)\n", "Simulating()\n", code.replace(old, new), flags=re.DOTALL)
    (tmp_path / "simulations.py").write_text(code, encoding="utf-8")
    return str(tmp_path / "simulations.py")


async def play_eight(tokenizer: Any, turns: list[str], *, rows: Any = lambda _: {}, **settings: Any) -> list[Any]:
    """Play eight episodes concurrently and check that every sampled token is trained."""

    async def play(number: int) -> Any:
        sample = Sample(prompt="What is 17 * 2?", label="34", index=number, metadata=rows(number))
        return await run(tokenizer, turns, settings={"tools": [], **settings}, sample=sample)

    played = await asyncio.gather(*map(play, range(8)))
    for one in played:
        assert one.facts["stop_reason"] == "completed", one.facts["error"]
        assert sum(one.sample.loss_mask) == sum(len(reply.ids) for reply in one.replied)
        assert not one.sample.remove_sample
    return played


async def test_simulated_user_talks_until_its_goal_is_met(shipped_tokenizer: Any, page: str) -> None:
    setting = {"environment": f"{page}:SimulatedUser", "rows": lambda number: {"opening": f"Hello {number}."}}
    for number, one in enumerate(await play_eight(shipped_tokenizer, ["It is 17.<|im_end|>", ANSWER], **setting)):
        assert f"user\nHello {number}.<" in one.decode(one.fake.requests[0].input_ids)
        assert (one.facts["user_turns"], "And times 2?" in one.context_after(0)) == (1, True)


async def test_simulated_tools_keep_state_per_episode(shipped_tokenizer: Any, page: str) -> None:
    for one in await play_eight(shipped_tokenizer, [LOOKS, LOOKS, ANSWER], environment=f"{page}:SimulatedTools"):
        assert ["0 calls before" in one.context_after(0), "1 calls before" in one.context_after(1)] == [True, True]


async def test_simulated_faults_are_per_episode(shipped_tokenizer: Any, page: str) -> None:
    setting = {"agent_factory": f"{page}:build", "rows": lambda number: {"faulty": number % 2 == 0}}
    for number, one in enumerate(await play_eight(shipped_tokenizer, [LOOKS, ANSWER], **setting)):
        assert ("3 coins" if number % 2 else "Tool call timed out") in one.context_after(0)


NO_MODEL = ("model=MODEL", "model=None")
FROM_CASE = ("(profile, initial_query=opening", ".from_case_for_user_simulator(Case(input=opening)")


@pytest.mark.parametrize(
    ("page", "environment"),
    [(NO_MODEL, "SimulatedUser"), (NO_MODEL, "SimulatedTools"), (FROM_CASE, "SimulatedUser")],
    indirect=["page"],
)
async def test_simulations_without_a_model_are_a_setup_error(
    shipped_tokenizer: Any, page: str, environment: str
) -> None:
    settings = {"tools": [], "environment": f"{page}:{environment}"}
    played = await run(shipped_tokenizer, [LOOKS, ANSWER], settings=settings)
    assert played.facts["stop_reason"] == "setup_error"
    assert "Strands would call Amazon Bedrock" in played.facts["error"]
