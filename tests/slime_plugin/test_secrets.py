"""Secrets known to the process are masked in dumps, results, tables and traces; tokens are unchanged."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import evaluate_on_fake
from harness import args_for, ids_of
from test_metrics import StandInWandb, wandb  # noqa: F401 - a fixture

from strands_rollout import Sample, log_rollout
from strands_rollout.dump import TokenTexts, read_dump, write_dump
from strands_rollout.integrations.traces import episode_spans
from strands_rollout.secret_mask import find_secrets, mask_values

KEY, PASSWORD, SERVER_KEY = "sk-live-5f1e02c7", "hunter22hunter", "tvly-77aa88bb"
ENVIRONMENT = {
    "SEARCH_API_KEY": KEY,
    "DATABASE_URL": f"postgres://me:{PASSWORD}@db/x",
    "QWEN3_TOKENIZER": "/a/tokenizer",
}
SERVER = {"name": "web", "command": "server", "env": {"TAVILY_API_KEY": SERVER_KEY}}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def leaky_sample(tokenizer: Any, *, with_facts: bool = True) -> Sample:
    response = f"DATABASE_URL=postgres://me:{PASSWORD}@db/x {KEY} {SERVER_KEY}"
    tokens = ids_of(tokenizer, f"What? {response} done")
    facts = {"error": f"ToolError: 401 for {KEY}", "final_text": response, "spans": [[0, 2, len(tokens), "1"]]}
    return Sample(
        prompt=f"Use {KEY}.",
        label=KEY,
        response=response,
        index=0,
        tokens=tokens,
        response_length=len(tokens) - 2,
        loss_mask=[1] * (len(tokens) - 2),
        rollout_log_probs=[-0.5] * (len(tokens) - 2),
        reward={"score": 0.0, "pred": KEY},
        status=Sample.Status.COMPLETED,
        metadata={"note": [f"{KEY}!"], KEY: 1, "strands_rollout": facts if with_facts else {}},
    )


def test_find_secrets_by_name_and_in_urls() -> None:
    values = {
        "OPENAI_API_KEY": "0123456789",
        "apiKey": "abcdefghij",
        "headers": {"Authorization": "Bearer 9876543210"},
        "proxies": ["http://me:pass-of-mine@proxy:3128"],
        "PWD": "/home/someone",
        "HF_TOKEN": "short",
        "TOKENIZERS_PARALLELISM": "false-false",
        "MONKEY": "chimpanzee",
        "max_tokens": 12345678,
    }
    assert find_secrets(values) == {"0123456789", "abcdefghij", "Bearer 9876543210", "9876543210", "pass-of-mine"}
    assert mask_values({"a": ("x 9876543210", 3)}, {"9876543210"}) == {"a": ("x ***", 3)}
    assert mask_values("abcdefgh-more", {"abcdefgh", "abcdefgh-more"}) == "***"


def test_dump_and_wandb_table_mask_secrets(
    shipped_tokenizer: Any,
    tmp_path: Path,
    wandb: StandInWandb,  # noqa: F811
) -> None:
    sample = leaky_sample(shipped_tokenizer)
    settings = {"dump_dir": str(tmp_path), "tools": [SERVER]}
    args = args_for("http://127.0.0.1:9", shipped_tokenizer, strands_rollout=settings, use_wandb=True)
    log_rollout(0, args, [sample], None, 1.0)
    (path,) = tmp_path.iterdir()
    text = gzip.decompress(path.read_bytes()).decode()
    shown = repr(wandb.calls)
    assert "*** ***" in shown
    assert not [secret for secret in (KEY, PASSWORD, SERVER_KEY) if secret in text + shown]
    (record,) = read_dump(path)
    assert record.values["tokens"] == sample.tokens
    assert record.values["response"] == "DATABASE_URL=postgres://me:***@db/x *** ***"
    assert sample.label == KEY  # the trained sample itself is unchanged


def test_episode_spans_mask_secrets(shipped_tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "old.jsonl"
    # write the secrets unmasked, as version 0.1.0 did
    write_dump(path, [leaky_sample(shipped_tokenizer)], TokenTexts(shipped_tokenizer), secrets=())
    (record,) = read_dump(path)
    secrets = find_secrets({**ENVIRONMENT, **SERVER})
    spans = episode_spans(record, reward_key="score", with_contents=True, secrets=secrets)
    shown = repr([span.attributes for span in spans])
    assert "done" in shown
    assert not [secret for secret in (KEY, PASSWORD) if secret in shown]


async def test_evaluation_results_mask_secrets(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    from strands_rollout.play import player as player_module

    async def generate_leaky(args: Any, sample: Any, params: Any, **more: Any) -> Any:
        leaked = leaky_sample(shipped_tokenizer)
        leaked.metadata["api_key"] = "key-of-the-row"

        leaked.index, leaked.session_id = sample.index, sample.session_id
        return leaked

    monkeypatch.setattr(player_module, "generate", generate_leaky)
    ended = await evaluate_on_fake(tmp_path, shipped_tokenizer, keeps_tokens=True)
    text = json.dumps(ended.lines)
    assert not [secret for secret in (KEY, PASSWORD, "key-of-the-row") if secret in text]
    assert ended.lines[0]["sample"]["tokens"] == leaky_sample(shipped_tokenizer).tokens
