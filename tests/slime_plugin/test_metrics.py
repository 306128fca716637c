"""`log_rollout` and `log_eval`: every metric compared with values computed by hand; no sample makes them raise."""

import copy
import logging
import sys
from argparse import Namespace
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from byte_tokens import byte_ids
from harness import ANSWER, call_text, run

from strands_rollout import Sample, StopReason, log_eval, log_rollout
from strands_rollout.slime_plugin import metrics
from strands_rollout.slime_plugin.metrics import PER_SAMPLE


@pytest.fixture(autouse=True)
def no_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the process's first step, so that each test has its own."""
    monkeypatch.setattr(metrics, "_FIRST_STEPS", {})


@dataclass(frozen=True)
class Table:
    columns: list[str]
    data: list[list[Any]]


class StandInWandb(ModuleType):
    """Stand-in for the module wandb, with a run; records the logged values."""

    run = "a run"
    Table = Table

    def __init__(self) -> None:
        super().__init__("wandb")
        self.calls: list[dict[str, Any]] = []

    def log(self, values: dict[str, Any]) -> None:
        self.calls.append(values)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandInWandb:
    module = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def finished(status: str = "completed", **facts: Any) -> Sample:
    return Sample(status=Sample.Status(status), index=0, metadata={"strands_rollout": facts} if facts else {})


def numbers(samples: Any, wandb: StandInWandb, *, step: int = 3, **args: Any) -> dict[str, float]:
    assert log_rollout(step, Namespace(use_wandb=True, **args), samples, None, 1.0) is False
    values = {name: value for name, value in wandb.calls[-1].items() if not isinstance(value, Table)}
    assert values.pop("rollout/step") == step
    assert all(name.startswith("rollout/agent/") for name in values)
    return {name.removeprefix("rollout/agent/"): value for name, value in values.items()}


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


CODES = [
    {"calls": 3, "queued_s": 0.5, "run_s": 1.0, "timeouts": 1, "killed": 1},
    {"calls": 2, "queued_s": 1.5, "run_s": 3.0, "timeouts": 0, "killed": 0},
    "none",
]
CODE_METRICS = {"calls": 5.0, "timeouts": 1.0, "killed": 1.0, "finished": 3.0, "queued_s/mean": 1.0, "run_s/max": 3.0}
BUDGETS = [{"response": 0.5, "context": None}, {"response": 1.0, "context": None}, None]
VERSIONS = [["7"], ["7", "10", "9"], ["default", "7"], [None], [], None]


@pytest.mark.parametrize(
    ("fact", "values", "expected"),
    [
        ("turns", [4, 1, 2, 3], {"turns/mean": 2.5, "turns/p50": 2.5, "turns/p90": 3.7, "turns/p99": 3.97}),
        ("turns", [4, 1, 2, 3], {"turns/max": 4.0, "samples": 4}),
        ("budgets", BUDGETS, {"budget/response/mean": 0.75, "budget/response/max": 1.0, "budget/context/mean": None}),
        ("code", CODES, {f"code/{name}": value for name, value in CODE_METRICS.items()}),
        ("weight_versions", VERSIONS, {"weight_versions/mean": 2.0, "weight_versions/max": 3.0}),
        ("weight_versions", VERSIONS, {"weight_version_spread/mean": 1.5, "weight_version_spread/max": 3.0}),
    ],
)
def test_log_rollout_logs_distributions_and_totals(fact, values, expected, wandb) -> None:
    found = numbers([finished(**{fact: value}) for value in values], wandb)
    for name, value in expected.items():
        assert found.get(name) == (value if value is None else pytest.approx(value)), name


@pytest.mark.parametrize("name", PER_SAMPLE)
def test_log_rollout_skips_samples_without_the_fact(name: str, wandb: StandInWandb) -> None:
    without = [{"other": 1}, {name: None}, {name: True}, {name: "7"}, {name: [7]}]
    found = numbers([finished(**facts) for facts in [{name: 3}, *without, {name: 5}]], wandb)
    assert (found[f"{name}/mean"], found[f"{name}/max"], found["samples"]) == (4.0, 5.0, 7.0)


def test_log_rollout_logs_shares_of_stop_reasons(wandb: StandInWandb) -> None:
    samples = [
        finished(stop_reason="completed"),
        finished(stop_reason="completed"),
        finished("truncated", stop_reason="turn_length"),
        finished("truncated", stop_reason="max_tool_calls"),
        finished("truncated", stop_reason="max_tool_calls"),
        finished("failed", stop_reason="engine_error"),
        finished("failed", stop_reason="of_another_version"),
        finished("failed"),
    ]
    samples[-1].remove_sample = samples[-2].remove_sample = True
    found = numbers(samples, wandb)
    assert (found["stop_reason/completed"], found["stop_reason/of_another_version"]) == (2 / 7, 1 / 7)
    assert found["stop_reason/sandbox_error"] == 0.0
    assert (found["truncation/turn_length"], found["truncation/max_tool_calls"]) == (1 / 3, 2 / 3)
    assert found["truncation/context_length"] == 0.0
    assert found["status/failed"] == found["status/truncated"] == 3 / 8
    assert (found["status/aborted"], found["removed"]) == (0.0, 0.25)
    assert {name for name in found if name.startswith("stop_reason/")} >= {f"stop_reason/{name}" for name in StopReason}
    assert not [name for name in numbers(samples[:1], wandb) if name.startswith("truncation")]
    assert numbers([samples[:2], [[samples[2]], *samples[3:]]], wandb) == found  # fan-outs are nested lists


def sample_with_trace(seconds: float, name: str = "reward_model", **facts: Any) -> SimpleNamespace:
    """Return a sample with slime's trace of a reward that took `seconds`."""
    events = [
        {"type": "span_start", "name": "sglang_generate", "ts": 1.0, "span_id": "a"},
        {"type": "span_end", "name": "sglang_generate", "ts": 2.0, "span_id": "a"},
        {"type": "span_start", "name": name, "ts": 10.0, "span_id": "b"},
        {"type": "event", "name": name, "ts": 10.5},
        {"type": "span_end", "name": name, "ts": 10.0 + seconds, "span_id": "b"},
        {"type": "span_start", "name": name, "ts": 90.0, "span_id": "never ended"},
    ]
    return SimpleNamespace(metadata={"strands_rollout": facts}, trace={"events": events})


@pytest.mark.parametrize("span", ["reward_model", "group_reward_model"])
def test_log_rollout_splits_time_of_slowest_sample(span: str, wandb: StandInWandb) -> None:
    fast = sample_with_trace(0.5, span, duration_s=9.0, generate_s=8.0, tool_s=1.0)
    slow = sample_with_trace(4.0, span, duration_s=7.0, generate_s=3.0, tool_s=1.5)
    found = numbers([fast, slow, finished(duration_s=10.0), finished(turns=1)], wandb)
    split = {name.removeprefix("slowest/"): value for name, value in found.items() if name.startswith("slowest/")}
    assert split == {"total_s": 11.0, "generate_s": 3.0, "tool_s": 1.5, "score_s": 4.0, "other_s": 2.5}
    assert (found["score_s/mean"], found["score_s/max"]) == (2.25, 4.0)


async def test_log_rollout_logs_drift_and_mismatch(
    shipped_tokenizer: Any, wandb: StandInWandb, caplog: pytest.LogCaptureFixture
) -> None:
    correct = (await run(shipped_tokenizer, [call_text("print(17 * 2)"), ANSWER])).sample
    faulty = copy.deepcopy(correct)
    facts = faulty.metadata["strands_rollout"]
    _, (_, second, end, _) = facts["spans"]
    word = byte_ids(shipped_tokenizer, " answer")
    del faulty.tokens[second - 1]
    faulty.tokens[-1:-1] = word
    facts["spans"][1] = [1, second - 1, end - 1 + len(word), "1"]
    faulty.response_length += len(word) - 1
    found = numbers([correct, faulty], wandb, hf_checkpoint=shipped_tokenizer.name_or_path)
    assert found["drift_tokens/max"] == found["text_drift_tokens/max"] == len(word)
    assert found["drift_share/max"] == len(word) / sum(end - start for _, start, end, _ in facts["spans"])
    assert found["off_policy_tokens/max"] == len(word) + 1
    assert found["mismatch_tokens/max"] > 0
    assert (found["mismatch_samples"], found["mismatch_samples_share"], found["mismatch_measured"]) == (1.0, 0.5, 2.0)
    assert (found["drift_samples"], found["drift_samples_share"], found["drift_measured"]) == (1.0, 0.5, 2.0)
    kinds = ("assistant_text", "tool_call", "whitespace", "special_tokens", "template")
    assert sum(found[f"drift_kind/{name}"] for name in kinds) == len(word)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("context is not what the chat template renders sample_index=0 token=")


@pytest.mark.parametrize(("check", "steps"), [("first_step", [3]), ("every_step", [3, 4])])
async def test_mismatch_check_selects_steps(
    check: str, steps: list[int], shipped_tokenizer: Any, wandb: StandInWandb
) -> None:
    played = (await run(shipped_tokenizer, [ANSWER])).sample
    args = {"hf_checkpoint": shipped_tokenizer.name_or_path, "strands_rollout": {"mismatch_check": check}}
    log_eval(2, Namespace(use_wandb=True, **args), {"aime": {"rewards": [1.0], "samples": [played]}}, None)
    assert wandb.calls[-1]["eval/aime/agent/mismatch_measured"] == 1.0
    numbers([Sample()], wandb, step=2, **args)  # a step without anything to compare
    found = {step: numbers([played], wandb, step=step, **args) for step in (3, 4)}
    assert [step for step in found if "mismatch_measured" in found[step]] == steps
    assert [found[step]["drift_measured"] for step in found] == [1.0, 1.0]
    log_eval(4, Namespace(use_wandb=True, **args), {"aime": {"rewards": [1.0], "samples": [played]}}, None)
    assert ("eval/aime/agent/mismatch_measured" in wandb.calls[-1]) == (check == "every_step")


async def test_log_rollout_omits_mismatch_if_template_fails(shipped_tokenizer, wandb, caplog, monkeypatch):
    sample = (await run(shipped_tokenizer, [ANSWER])).sample
    sample.metadata["strands_rollout"]["template_kwargs"] = {"chat_template": "{{ messages[-1].content }}"}
    for _ in range(2):
        found = numbers([sample], wandb, hf_checkpoint=shipped_tokenizer.name_or_path)
    assert found["drift_measured"] == 1.0
    assert not [name for name in found if name.startswith("mismatch")]
    (warning,) = warnings_of(caplog)
    assert warning.startswith("context is not compared with the chat template: ")


async def test_log_rollout_metrics_match_facts_of_episode(shipped_tokenizer, wandb, caplog) -> None:
    episode = await run(shipped_tokenizer, [call_text("print(17 * 2)"), ANSWER], settings={"executor": "subprocess"})
    found = numbers([episode.sample], wandb, hf_checkpoint=shipped_tokenizer.name_or_path)
    assert (found["turns/max"], found["tool_calls/max"], found["code/calls"]) == (2.0, 1.0, 1.0)
    assert found["sampled_tokens/max"] == sum(episode.sample.loss_mask)
    assert (found["drift_measured"], found["drift_tokens/max"], found["weight_versions/max"]) == (1.0, 0.0, 1.0)
    assert (found["mismatch_measured"], found["mismatch_tokens/max"], found["mismatch_samples"]) == (1.0, 0.0, 0.0)
    assert found["slowest/total_s"] == episode.facts["duration_s"]
    assert found["stop_reason/completed"] == found["status/completed"] == 1.0
    assert warnings_of(caplog) == []
    found = numbers([episode.sample], wandb, hf_checkpoint=None)
    assert "drift_measured" not in found
    assert found["turns/max"] == 2.0
    assert warnings_of(caplog) == ["metric failed and was left out name=drift error=ConfigError"]


def test_log_eval_logs_each_data_set_by_eval_step(wandb: StandInWandb) -> None:
    data = {
        "aime": {"rewards": [1.0], "truncated": [False], "samples": [finished(turns=2)]},
        "math": {"rewards": [1.0], "samples": [[finished(turns=3), finished(turns=5)]]},
        "foreign": {"rewards": [0.0]},
    }
    assert log_eval(5, Namespace(use_wandb=True), data, {"eval/x": 1.0}) is False
    (call,) = wandb.calls
    assert (call["eval/step"], call["eval/aime/agent/turns/mean"], call["eval/math/agent/turns/mean"]) == (5, 2.0, 4.0)
    tables = [name for name, value in call.items() if isinstance(value, Table)]
    assert tables == ["eval/aime/agent/transcripts", "eval/math/agent/transcripts"]
    assert not [name for name in call if name.startswith("eval/foreign")]


def graded_sample(acc: float, status: str = "COMPLETED", method: str = "exact", *, as_number: bool = False) -> Sample:
    details = {"score": 2 * acc - 1, "acc": acc, "method": method, "error": "" if method == "exact" else "no judge."}
    sample = finished(turns=1, **({"reward": details} if as_number else {}))
    sample.reward = details["score"] if as_number else details
    sample.status = Sample.Status[status]
    return sample


RIGHT, WRONG, CUT = (1.0, "COMPLETED"), (0.0, "COMPLETED"), (0.0, "TRUNCATED")
OUTAGE = (0.0, "FAILED")
NO_JUDGE, REWARD_ERROR, NO_LABEL = ((0.0, "COMPLETED", method) for method in ("no_judge", "error", "no_label"))


@pytest.mark.parametrize("as_number", [False, True])
@pytest.mark.parametrize(
    ("outcomes", "args", "kept", "missing", "accuracy"),
    [
        ([RIGHT, CUT, WRONG, RIGHT], {}, [0, 1, 2, 3], 0.0, 0.5),
        ([RIGHT, OUTAGE, WRONG, OUTAGE], {}, [0, 2], 2.0, 0.5),
        ([RIGHT, OUTAGE, WRONG, RIGHT], {"log_passrate": True, "n_samples_per_eval_prompt": 2}, [0, 2, 3], 1.0, 2 / 3),
        ([RIGHT, OUTAGE], {"log_passrate": True, "n_samples_per_eval_prompt": 2}, [0], 1.0, 1.0),
        ([OUTAGE, OUTAGE], {}, None, 2.0, None),
        ([RIGHT, NO_JUDGE, WRONG, REWARD_ERROR, NO_LABEL], {}, [0, 2], 3.0, 0.5),
        ([RIGHT, NO_JUDGE, OUTAGE, RIGHT], {"log_passrate": True, "n_samples_per_eval_prompt": 2}, [0, 3], 2.0, 1.0),
        ([NO_JUDGE, REWARD_ERROR], {}, None, 2.0, None),
    ],
)
def test_log_eval_counts_outages_as_missing(caplog, wandb, outcomes, args, kept, missing, accuracy, as_number) -> None:
    samples = [graded_sample(*outcome, as_number=as_number) for outcome in outcomes]
    rewards = [float(at) for at in range(len(samples))]
    data = {"aime": {"rewards": rewards, "truncated": [False] * len(samples), "samples": list(samples)}, "none": {}}
    assert log_eval(5, Namespace(use_wandb=True, **args), data, None) is False
    found = wandb.calls[0]
    assert found["eval/aime/agent/missing"] == missing
    assert found.get("eval/aime/agent/accuracy") == (None if accuracy is None else pytest.approx(accuracy))
    if kept is None:
        assert "aime" not in data
    else:
        assert data["aime"]["rewards"] == [rewards[at] for at in kept]
        assert data["aime"]["samples"] == [samples[at] for at in kept]
        assert data["aime"]["truncated"] == [False] * len(kept)
    levels = [record.levelname for record in caplog.records if "event=evaluation_incomplete" in record.message]
    assert levels == ([] if not missing else ["ERROR" if missing == len(samples) else "WARNING"])
    assert "last_error=None" not in caplog.text or OUTAGE in outcomes
    assert found["eval/aime/agent/ungraded"] == sum(len(outcome) > 2 for outcome in outcomes)


class Unreadable:
    """A sample whose attributes raise, except those in `readable`."""

    def __init__(self, **readable: Any) -> None:
        vars(self).update(readable)

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


def test_log_rollout_skips_unreadable_sample_and_warns_once(wandb, caplog) -> None:
    for _ in range(3):
        removed = finished(turns=4, stop_reason="completed")
        removed.remove_sample = True
        found = numbers([Unreadable(), removed, Unreadable(status="completed")], wandb)
        assert (found["samples"], found["turns/mean"], found["removed"]) == (3.0, 4.0, 1.0)
        assert found["stop_reason/completed"] == found["status/completed"] == 1.0
        table = wandb.calls[-1]["rollout/agent/transcripts"]
        assert [row[table.columns.index("turns")] for row in table.data] == [4]
    statuses = [message for message in warnings_of(caplog) if "name=status" in message]
    assert statuses == ["metric failed for a sample and left it out name=status error=RuntimeError"]
    assert not [message for message in warnings_of(caplog) if "for a sample" not in message]
    assert "no status" in caplog.text


@pytest.mark.parametrize("arguments", [(None, None, None), ("x", object(), 7), (0, Namespace(), iter([]))])
def test_log_rollout_and_log_eval_never_raise(arguments: tuple[Any, Any, Any]) -> None:
    assert log_rollout(*arguments, None, 1.0) is False
    assert log_eval(*arguments, None) is False


def test_log_rollout_without_wandb_logs_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # `import wandb` raises as if it were not installed
    caplog.set_level("INFO", logger="strands_rollout")
    log_rollout(7, Namespace(use_wandb=False), [finished(turns=2), finished(turns=3)], {"perf/x": 1.0}, 2.0)
    (line,) = caplog.messages
    assert line.startswith("agent metrics rollout_id=7 rollout/step=7 rollout/agent/samples=2 ")
    assert " rollout/agent/turns/mean=2.5 " in line
    assert "\n" not in line
    log_rollout(1, Namespace(use_wandb=True), [finished(turns=2)], None, 1.0)
    assert warnings_of(caplog) == ["metric failed and was left out name=wandb error=ModuleNotFoundError"]
    assert len([message for message in caplog.messages if message.startswith("agent metrics")]) == 2


@pytest.mark.parametrize("package", ["slime.observability", "slime.utils"])
def test_log_rollout_uses_slimes_step_and_tensorboard(package, monkeypatch, caplog) -> None:
    written: list[tuple[bool, dict[str, Any], str]] = []

    def log(args: Namespace, metrics: dict[str, Any], step_key: str) -> None:
        written.append((args.use_wandb, metrics, step_key))

    for name, functions in {
        "metric_utils": {"compute_rollout_step": lambda _args, n: n * 10},
        "logging_utils": {"log": log},
    }.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, f"{package}.{name}", module)
    log_rollout(3, Namespace(use_wandb=False, use_tensorboard=True), [finished(turns=2)], None, 1.0)
    [(use_wandb, values, step_key)] = written
    assert (use_wandb, step_key, values[step_key]) == (False, "rollout/step", 30)
    assert (values["rollout/agent/turns/mean"], warnings_of(caplog)) == (2, [])


@pytest.mark.parametrize(("path", "warned"), [(None, 1), ("strands_rollout.normalize_rewards", 0)])
def test_log_rollout_warns_once_of_unenforced_staleness(path, warned, caplog) -> None:
    args = Namespace(strands_rollout={"max_sample_staleness": 4}, custom_reward_post_process_path=path)
    for _ in range(2):
        log_rollout(3, args, [finished(turns=2)], None, 1.0)
    message = "max_sample_staleness is 4 and has no effect without slime's --custom-reward-post-process-path"
    assert [message in warning for warning in warnings_of(caplog)] == [True] * warned


@pytest.mark.parametrize(("old", "warned"), [(1, False), (3, True)])
def test_log_rollout_warns_of_many_samples_too_old(
    old: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    staleness = [9.0] * old + [0.0] * (10 - old)
    monkeypatch.setattr(
        "strands_rollout.slime_plugin.metrics.known_staleness", lambda samples: staleness[: len(samples)]
    )
    args = Namespace(strands_rollout={"max_sample_staleness": 4}, custom_reward_post_process_path="x")
    caplog.set_level("INFO")
    log_rollout(3, args, [finished(turns=2) for _ in range(10)], None, 1.0)
    assert f"rollout/agent/too_old=0.{old}" in caplog.text
    assert ("event=samples_too_old share=0.30" in caplog.text) == warned


def test_log_rollout_warns_once_of_missing_trackers(wandb: StandInWandb, caplog: pytest.LogCaptureFixture) -> None:
    wandb.run = None  # type: ignore[assignment]
    for rollout_id in range(2):
        log_rollout(rollout_id, Namespace(use_wandb=True, use_tensorboard=True), [finished(turns=2)], None, 1.0)
    not_logged = "is set, but has no effect on this package's metrics:"
    modules = "slime.observability.logging_utils or slime.utils.logging_utils"
    assert warnings_of(caplog) == [
        f"--use-wandb {not_logged} this process has no wandb run",
        f"--use-tensorboard {not_logged} slime has loaded no {modules} with a function log",
    ]


def test_log_rollout_skips_load_debug_rollout_data(wandb, caplog) -> None:
    caplog.set_level("INFO", logger="strands_rollout")
    args = Namespace(use_wandb=True, load_debug_rollout_data="rollout_0.pt")
    assert log_rollout(0, args, [finished(turns=2)], None, 1.0) is False
    assert (wandb.calls, caplog.messages) == ([], [])
