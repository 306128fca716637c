"""`Policy` on the shipped model: logprobs, updates, checkpoints."""

import json
import shutil
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from sequences import MODEL, plain_log_probs, sequence

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from strands_rollout.errors import ConfigError, TrajectoryError  # noqa: E402
from strands_rollout.play.options import UpdateSettings  # noqa: E402
from strands_rollout.train import policy as policy_module  # noqa: E402
from strands_rollout.train.policy import Policy  # noqa: E402

PREFIX = [1192, 45, 300, 7, 7, 81]
GENTLE = UpdateSettings(learning_rate=1e-5, updates=1)


@pytest.fixture(scope="module")
def loaded() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def some_sequences(count: int = 5) -> list[Any]:
    """Return sequences of several lengths, most with a common prefix; every other response token is trained."""
    rng = Random(3)
    made = []
    for number in range(count):
        response = [rng.randrange(1190) for _ in range(3 + 5 * number)]
        prompt = [*PREFIX, rng.randrange(1190)] if number else PREFIX[:3]
        made.append(sequence([*prompt, *response], [(at + number) % 2 for at in range(len(response))]))
    return [one for one in made if any(one.loss_mask)]


@pytest.mark.parametrize(("temperature", "micro_batch_logits"), [(1.0, 1), (0.7, 50_000), (1.0, 10_000_000)])
def test_measure_equals_forward_pass_of_each_sequence(loaded, temperature, micro_batch_logits, monkeypatch):
    monkeypatch.setattr(policy_module, "_MAX_MICRO_BATCH_LOGITS", micro_batch_logits)
    sequences = some_sequences()
    measured = Policy(MODEL, replace(GENTLE, temperature=temperature)).measure(sequences)
    for one, own in zip(sequences, measured, strict=True):
        assert own.log_probs.tolist() == pytest.approx(plain_log_probs(loaded, one, temperature), abs=2e-4)
        assert len(own.entropy) == sum(one.loss_mask)
    one, own = sequences[-1], measured[-1]
    with torch.no_grad():
        probs = torch.softmax(loaded(torch.tensor([one.tokens])).logits[0] / temperature, dim=-1)
    expected = [-(probs[at - 1] * probs[at - 1].log()).sum().item() for at in one.trained_positions]
    assert own.entropy.tolist() == pytest.approx(expected, abs=1e-4), "the entropy of the sampling distributions"


def test_update_moves_logprobs_with_advantages():
    policy = Policy(MODEL, GENTLE)
    good, bad = some_sequences()[-2:]
    pair = [good, replace(bad, advantage=-1.0)]
    before = policy.measure(pair)
    metrics = policy.update(pair, before).to_record()
    after = policy.measure(pair)
    assert after[0].log_probs.mean() > before[0].log_probs.mean()
    assert after[1].log_probs.mean() < before[1].log_probs.mean()
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["clip_fraction"] == 0.0


def with_log_probs(one: Any, *, shift: float = 0.0, context: float = 0.0) -> Any:
    """Return the sequence with rollout logprobs: the policy's plus `shift` at trained tokens, `context` at others."""
    log_probs = [context] * len(one.loss_mask)
    own = Policy(MODEL, GENTLE).measure([one])[0].log_probs.tolist()
    for position, value in zip(one.trained_positions, own, strict=True):
        log_probs[position - one.prompt_length] = value + shift
    return replace(one, log_probs=log_probs)


def updated(one: Any, **settings: Any) -> dict[str, float]:
    """Return the metrics of one update of a new policy."""
    policy = Policy(MODEL, replace(GENTLE, **settings))
    return policy.update([one], policy.measure([one])).to_record()


def test_update_ignores_masked_tokens():
    one = some_sequences()[-1]
    assert updated(with_log_probs(one, context=-100.0)) == pytest.approx(updated(one), rel=1e-4)


def test_update_uses_rollout_logprobs_as_behavior_policy():
    shifted = with_log_probs(some_sequences()[-1], shift=-0.1)
    assert updated(shifted)["ratio_mean"] == pytest.approx(1.10517, abs=1e-3)
    truncated = updated(shifted, tis_clip=1.05)
    assert (truncated["ratio_mean"], truncated["tis_clip_fraction"]) == (pytest.approx(1.0, abs=1e-4), 1.0)


def test_update_keeps_siblings_in_one_step():
    first, second = some_sequences()[-2:]
    tokens = sum(first.loss_mask) + sum(second.loss_mask)
    siblings = [replace(one, denominator=tokens, rollout="theirs", advantage=0.0) for one in [first, second, second]]
    other = replace(first, advantage=2.0)
    policy = Policy(MODEL, replace(GENTLE, updates=2))
    metrics = policy.update([*siblings, other], policy.measure([*siblings, other]))
    # the first step has only the siblings, without advantage; the second step has only the other sample
    assert (metrics.counts["loss"], metrics.sums["loss"]) == (1, pytest.approx(-2.0, abs=1e-3))


def test_update_refuses_nonfinite_gradient():
    one = some_sequences()[-1]
    policy = Policy(MODEL, GENTLE)
    before = policy.measure([one])
    with pytest.raises(TrajectoryError, match="gradient of norm nan.*lower --learning-rate"):
        policy.update([replace(one, advantage=float("nan"))], before)
    assert torch.equal(policy.measure([one])[0].log_probs, before[0].log_probs)


def test_write_weights_writes_loadable_model_folder(loaded, tmp_path):
    from safetensors.torch import load_file

    shutil.copytree(MODEL, tmp_path / "model")
    (tmp_path / "model/.cache").mkdir()  # subfolders are not copied
    policy = Policy(tmp_path / "model", GENTLE)
    for _ in range(2):  # the second call replaces the files of the first
        policy.write_weights(tmp_path / "weights")
    state = load_file(tmp_path / "weights/model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in state.values())
    assert all(torch.equal(weight, loaded.state_dict()[name]) for name, weight in state.items())
    names = {path.name for path in (tmp_path / "weights").iterdir()}
    assert names >= {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert ".cache" not in names
    assert json.loads((tmp_path / "weights/config.json").read_text())["vocab_size"] == 1200
    assert {path.name for path in tmp_path.iterdir()} == {"model", "weights"}


def test_restored_policy_continues_identically(tmp_path):
    sequences = some_sequences()
    policy = Policy(MODEL, replace(GENTLE, learning_rate=1e-3))
    policy.update(sequences, policy.measure(sequences))
    policy.save(tmp_path / "policy.pt")
    policy.update(sequences, policy.measure(sequences))
    other = Policy(MODEL, replace(GENTLE, learning_rate=1e-3))
    other.restore(tmp_path / "policy.pt")
    other.update(sequences, other.measure(sequences))
    for one, two in zip(policy.measure(sequences), other.measure(sequences), strict=True):
        assert torch.equal(one.log_probs, two.log_probs)


def test_restore_refuses_other_files(tmp_path):
    (tmp_path / "policy.pt").write_bytes(b"none")
    with pytest.raises(ConfigError, match=r"can't resume from .*policy\.pt.*--out"):
        Policy(MODEL, GENTLE).restore(tmp_path / "policy.pt")
    with pytest.raises(ConfigError, match="can't load the model of"):
        Policy(tmp_path, GENTLE)
