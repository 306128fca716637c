"""`strands-rollout eval` compared with slime's own evaluation on the same file and engine."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from evaluation_stage import options_for
from slime_install import eval_sends_all_parameters, observability
from slime_policy import prompt
from slime_run import TOOLS, chat_row, write_rows
from slime_stage import Start
from test_slime_eval import PLANS

from strands_rollout.evaluation.results import mean_pass_at_k
from strands_rollout.evaluation.run import run_evaluation
from strands_rollout.play.options import Sampling

pytestmark = pytest.mark.slime


def write_config(folder: Path) -> Path:
    rows = [chat_row(prompt(task, number)) for number, task in enumerate(PLANS)]
    data = write_rows(folder / "eval.jsonl", rows)
    defaults = {"n_samples_per_eval_prompt": 2, "temperature": 0.6, "top_p": 0.95, "max_response_len": 300}
    entries: list[dict[str, Any]] = [
        {"name": "plain", "path": str(data), "rm_type": "math"},
        {"name": "part", "path": f"{data}@[1:]", "top_k": 20, "temperature": 1.0},
    ]
    if eval_sends_all_parameters():
        entries[1]["repetition_penalty"] = 1.1
        stops = {"stop": ["END"], "stop_token_ids": [7], "min_new_tokens": 2}
        entries.append({"name": "stops", "path": f"{data}@[:1]", **stops})
    path = folder / "eval.yaml"
    path.write_text(yaml.safe_dump({"eval": {"defaults": defaults, "datasets": entries}}))
    return path


def sent(engine: Any) -> list[str]:
    """Return input ids and sampling parameters of the engine's requests since the last call, in sorted order."""
    asked = [
        json.dumps([request.body["input_ids"], request.body["sampling_params"]], sort_keys=True)
        for request in engine.requests
    ]
    engine.requests.clear()
    return sorted(asked)


async def test_eval_command_matches_slimes_requests_and_scores(start: Start, tmp_path: Path) -> None:
    config = write_config(tmp_path)
    stage = await start(PLANS)
    parsed = yaml.safe_load(config.read_text())["eval"]
    stage.rollouts.evaluate_on(*parsed["datasets"], **parsed["defaults"])
    theirs = await stage.rollouts.evaluate()
    asked_by_slime = sent(stage.engine)

    settings = tmp_path / "tools.yaml"
    settings.write_text(yaml.safe_dump({"strands_rollout": {"tools": list(TOOLS)}}))
    options = replace(
        options_for(tmp_path, stage.engine.base_url, stage.tokenizer, seed=None, data=[], config=settings),
        eval_config=config,
        sampling=Sampling(samples=1, max_new_tokens=512),
    )
    assert await asyncio.to_thread(run_evaluation, options) == 0
    assert sent(stage.engine) == asked_by_slime

    lines = [json.loads(line) for line in (options.out / "results.jsonl").read_text().splitlines()]
    for name, result in theirs.items():
        own = sorted((line for line in lines if line["data_set"] == name), key=lambda line: line["problem"])
        assert [line["reward"]["acc"] for line in own] == result["rewards"]
        assert [line["status"] == "truncated" for line in own] == result["truncated"]
    report = json.loads((options.out / "report.json").read_text())["data_sets"]
    assert {name: one["avg_at_n"] for name, one in report.items()} == {
        name: pytest.approx(sum(result["rewards"]) / len(result["rewards"]), abs=1e-6)
        for name, result in theirs.items()
    }


def test_eval_command_pass_at_k_matches_slime() -> None:
    compute_pass_rate = observability("metric_utils.compute_pass_rate")
    random = Random(1)
    rewards = [float(random.random() < problem / 10) for problem in range(10) for _ in range(16)]
    counts = [(int(sum(rewards[start : start + 16])), 16) for start in range(0, 160, 16)]
    for name, value in compute_pass_rate(rewards, 16).items():
        assert mean_pass_at_k(counts, int(name.removeprefix("pass@"))) == pytest.approx(value)
