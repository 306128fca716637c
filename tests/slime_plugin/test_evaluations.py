"""`log_eval`: pass rates, also of problems with failed samples; and the evaluation of a run's checkpoint."""

import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from strands_rollout.samples import Sample
from strands_rollout.slime_plugin.evaluations import pass_rates, samples_per_problem
from strands_rollout.slime_plugin.metrics import log_eval


class StandInRun:
    def __init__(self) -> None:
        self.logged: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, Any]) -> None:
        self.logged.append(values)

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.metrics[name] = step_metric

    def finish(self) -> None:
        self.finished = True


class StandInWandb(ModuleType):
    """Stand-in for the module wandb without a run; `init` creates one."""

    run = None
    Table = staticmethod(lambda **_: None)
    Settings = staticmethod(lambda **given: given)

    def __init__(self) -> None:
        super().__init__("wandb")
        self.created = StandInRun()
        self.given: dict[str, Any] = {}
        self.inits = 0

    def init(self, **given: Any) -> StandInRun:
        self.inits += 1
        self.given = given
        return self.created


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> StandInWandb:
    module = StandInWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def sample(*, failed: bool = False) -> Sample:
    status = Sample.Status.FAILED if failed else Sample.Status.COMPLETED
    return Sample(status=status, index=0, reward=1.0, metadata={"strands_rollout": {"turns": 1}})


def slimes_pass_rates(rewards: list[float], size: int) -> dict[str, float]:
    """Return pass@k of whole problems, by the product that slime and the Codex paper use."""
    rates = {}
    for k in (2**power for power in range(size.bit_length())):
        estimates = []
        for start in range(0, len(rewards), size):
            right = sum(reward == 1 for reward in rewards[start : start + size])
            factors = 1.0 - k / np.arange(size - right + 1, size + 1)
            estimates.append(1.0 if size - right < k else 1.0 - np.prod(factors))
        rates[f"pass@{k}"] = float(np.mean(estimates))
    return rates


@pytest.mark.parametrize("size", [2, 4, 6, 16])
def test_pass_rates_of_whole_problems_equal_slimes(size: int) -> None:
    rewards = [float((number * 7) % 5 < 2) for number in range(5 * size)]
    assert pass_rates(enumerate(rewards), size) == pytest.approx(slimes_pass_rates(rewards, size))


def test_pass_rates_count_every_kind_of_one() -> None:
    rewards = [True, 1, np.float32(1), np.True_, False, None, "1", {"score": 1}]
    assert pass_rates(enumerate(rewards), 8)["pass@1"] == 0.5


def test_pass_rates_keep_a_problem_with_a_missing_sample() -> None:
    kept = [(0, 1.0), (1, 0.0), (3, 0.0), (4, 0.0), (5, 0.0), (6, 1.0), (7, 1.0)]
    assert pass_rates(kept, 4) == pytest.approx(
        {"pass@1": (1 / 3 + 1 / 2) / 2, "pass@2": (2 / 3 + 5 / 6) / 2, "pass@4": 1.0}
    )
    assert pass_rates([(0, 1.0)], 1) == {}
    assert pass_rates([(0, 1.0)], 4) == {"pass@1": 1.0}


def test_samples_per_problem_are_those_of_the_data_set() -> None:
    sets = [Namespace(name="aime", n_samples_per_eval_prompt=32), Namespace(name="gsm8k")]
    args = Namespace(n_samples_per_eval_prompt=4, eval_datasets=sets)
    assert [samples_per_problem(args, name) for name in ("aime", "gsm8k", "other")] == [32, 4, 4]


def test_log_eval_logs_pass_rates_instead_of_slime(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    args = Namespace(log_passrate=True, n_samples_per_eval_prompt=2)
    for _ in range(2):  # slime passes the same args again
        samples = [sample(), sample(failed=True), sample(), sample()]
        data: dict[str, Any] = {"aime": {"rewards": [1.0, 0.0, 0.0, 1.0], "samples": samples}}
        caplog.clear()
        log_eval(3, args, data, None)
        assert "eval/aime-pass@1=0.75" in caplog.text
        assert "eval/aime-pass@2=1" in caplog.text
        assert args.log_passrate is False
        assert data["aime"]["rewards"] == [1.0, 0.0, 1.0]


def test_log_eval_without_log_passrate_logs_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    log_eval(3, Namespace(), {"aime": {"rewards": [1.0], "samples": [sample()]}}, None)
    assert "pass@" not in caplog.text


@pytest.mark.parametrize("shared", ["1", "0"])
def test_log_eval_of_a_checkpoint_logs_to_the_trainings_run(
    shared: str, wandb: StandInWandb, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"STRANDS_ROLLOUT_EVAL_STEP": "179", "STRANDS_ROLLOUT_EVAL_SHARED": shared}
    for name, value in {**given, "WANDB_RUN_ID": "abc", "WANDB_PROJECT": "p"}.items():
        monkeypatch.setenv(name, value)
    data = {"aime": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": [sample(), sample()]}}
    assert log_eval(0, Namespace(log_passrate=True, n_samples_per_eval_prompt=2), data, None) is False
    assert (wandb.given["id"], wandb.given["project"], wandb.given["resume"]) == ("abc", "p", "allow")
    assert (wandb.given["settings"] == {}) == (shared == "0")
    assert {values["eval/step"] for values in wandb.created.logged} == {179}
    found = {name: value for values in wandb.created.logged for name, value in values.items()}
    assert (found["eval/aime"], found["eval/aime-truncated_ratio"], found["eval/aime-pass@1"]) == (0.5, 0.5, 0.5)
    assert found["eval/aime/agent/turns/mean"] == 1
    assert wandb.created.metrics["eval/*"] == "eval/step"
    assert wandb.created.finished


def test_log_eval_in_training_opens_no_run(wandb: StandInWandb, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_RUN_ID", "abc")
    log_eval(0, Namespace(), {"aime": {"rewards": [1.0], "samples": [sample()]}}, None)
    assert wandb.inits == 0
