"""slime's rollouts against a scripted engine behind a router."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_sglang import FakeSGLang
from slime_policy import Policy, prompt
from slime_run import CONTEXT_LENGTH, Rollouts, arguments, chat_row, write_rows


@dataclass(frozen=True)
class Stage:
    """The objects of a test: the engine, its policy, slime's rollouts, and the tokenizer."""

    engine: FakeSGLang
    policy: Policy
    rollouts: Rollouts
    tokenizer: Any


Start = Callable[..., Awaitable[Stage]]


async def set_up(
    stack: AsyncExitStack,
    tokenizer: Any,
    folder: Path,
    plans: Mapping[str, Sequence[Any]],
    tasks: Sequence[str] = (),
    *,
    rows: Sequence[Mapping[str, Any]] = (),
    context_length: int = CONTEXT_LENGTH,
    **slime_arguments: Any,
) -> Stage:
    """Start a fake engine with a scripted policy, and build slime's rollouts on it; `stack` stops the engine.

    A rollout takes each prompt twice, unless `slime_arguments` set `n_samples_per_prompt`.

    Args:
        stack: Stack that the engine is entered into.
        tokenizer: Tokenizer of the policy.
        folder: Folder for the data set and the dumps.
        plans: The policy's turns by task name.
        tasks: Tasks of the prompts, one prompt each; empty for one prompt for each plan. Ignored if `rows` are given.
        rows: The data set's rows.
        context_length: The engine's context length in tokens.
        **slime_arguments: Arguments of slime that differ from the tests' defaults.
    """
    policy = Policy(tokenizer, dict(plans))
    fake = FakeSGLang(policy, context_length=context_length, vocab_size=len(tokenizer), router=True)
    engine = await stack.enter_async_context(fake)
    rows = rows or [chat_row(prompt(task, number)) for number, task in enumerate(tasks or plans)]
    args = arguments_for(tokenizer, folder, rows, engine, slime_arguments)
    return Stage(engine, policy, Rollouts(args), tokenizer)


def arguments_for(tokenizer, folder, rows, engine, given):
    """Return slime's arguments for a data set of these rows; by default a rollout takes each row twice."""
    given = {"n_samples_per_prompt": 2, "rollout_batch_size": len(rows), **_replayable(given)}
    batch = given["rollout_batch_size"]
    host, _, port = engine.base_url.removeprefix("http://").partition(":")
    derived = {"over_sampling_batch_size": batch, "global_batch_size": batch * given["n_samples_per_prompt"]}
    return arguments(
        str(tokenizer.name_or_path),
        prompt_data=str(write_rows(folder / "rows.jsonl", rows)),
        sglang_router_ip=host,
        sglang_router_port=int(port),
        save_debug_rollout_data=str(folder / "rollout_{rollout_id}.pt"),
        **{**derived, **given},
    )


def _replayable(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments, with top-p 1 if this slime can't replay top-p ids, as before 0.3.1.

    A test without routing replay is skipped instead.
    """
    from slime.utils.types import Sample

    if given.get("rollout_top_p", 1.0) == 1.0 or hasattr(Sample(), "rollout_top_p_token_ids"):
        return dict(given)
    if not given.get("use_rollout_routing_replay"):
        pytest.skip("this slime does not replay kept top-p ids")
    return {**given, "rollout_top_p": 1.0}
