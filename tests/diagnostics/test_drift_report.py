"""`strands-rollout drift`: its report, exit code and errors."""

import json
from pathlib import Path
from typing import Any

from byte_tokens import byte_ids
from dumped_samples import parts_of, sample_of_parts, write_sample_dump
from harness import ANSWER, call_text, ids_of, run
from typer.testing import CliRunner, Result

from strands_rollout.cli.commands import app
from strands_rollout.dump import TokenTexts, write_dump
from strands_rollout.engine import SHIPPED_MODEL_DIR
from strands_rollout.errors import ConfigError

QUESTION = "What is 17 * 2?"


def drift(*arguments: object, tokenizer: object = SHIPPED_MODEL_DIR) -> Result:
    given = [] if tokenizer is None else ["--tokenizer", str(tokenizer)]
    return CliRunner().invoke(app, ["drift", *map(str, arguments), *given])


async def test_drift_reports_and_exits_with_1_on_wrong_context(shipped_tokenizer: Any, tmp_path: Path) -> None:
    sample = (await run(shipped_tokenizer, [call_text(), ANSWER], prompt=QUESTION)).sample
    prompt, call, context, answer = parts_of(sample)
    drifting = sample_of_parts([prompt, [*byte_ids(shipped_tokenizer, " number"), *answer]], index=1, prompt=QUESTION)
    right = drift(write_sample_dump(tmp_path, sample, drifting), "--json")
    lines = [json.loads(line) for line in right.stdout.splitlines()]
    assert (right.exit_code, [line.get("index") for line in lines]) == (0, [0, 1, None])
    totals = lines[-1]
    assert (totals["episodes"], totals["drifted_episodes"], totals["drifted_share"]) == (2, 1, 0.5)
    assert (totals["turn_drift"], totals["off_policy"], totals["mismatched_tokens"]) == (7, 7 + len(answer), 0)
    broken = sample_of_parts([prompt, call, context[1:], answer], prompt=QUESTION)
    wrong = drift(write_sample_dump(tmp_path, broken, name="wrong.jsonl"))
    assert (wrong.exit_code, "differ from the chat template's rendering" in wrong.stdout) == (1, True)


async def test_drift_refuses_another_tokenizer(shipped_tokenizer, qwen3_tokenizer, tmp_path) -> None:
    sample = (await run(shipped_tokenizer, [call_text(), ANSWER], prompt=QUESTION)).sample
    with_texts, without = tmp_path / "with.jsonl", tmp_path / "without.jsonl"
    write_dump(with_texts, [sample], TokenTexts(shipped_tokenizer))
    assert drift(with_texts, tokenizer=None).exit_code == drift(with_texts).exit_code == 0
    foreign = drift(with_texts, tokenizer=qwen3_tokenizer.name_or_path)
    assert isinstance(foreign.exception, ConfigError)
    written = f"{with_texts}:1 was written with the tokenizer {SHIPPED_MODEL_DIR}, and {qwen3_tokenizer.name_or_path}"
    assert written in str(foreign.exception)
    texts = dict(TokenTexts(shipped_tokenizer))
    write_dump(tmp_path / "older.jsonl", [sample], texts)
    older = drift(tmp_path / "older.jsonl", tokenizer=qwen3_tokenizer.name_or_path)
    assert f"{tmp_path / 'older.jsonl'}:1 has the token " in str(older.exception)
    unnamed = drift(tmp_path / "older.jsonl", tokenizer=None)
    assert isinstance(unnamed.exception, ConfigError)
    assert "names no tokenizer; pass the policy's tokenizer with --tokenizer DIR" in str(unnamed.exception)
    write_dump(without, [sample_of_parts([ids_of(qwen3_tokenizer, "Frage 東京"), ids_of(qwen3_tokenizer, "Antwort")])])
    unknown = drift(without)
    assert isinstance(unknown.exception, ConfigError)
    assert "of the 7 ids, such as" in str(unknown.exception)
