"""Loss and gradient equal those of slime's own functions, on ragged sequences with gaps in their masks."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sequences import MODEL, sequence
from slime_loss import checkout, slimes_loss

pytestmark = [pytest.mark.slime, pytest.mark.torch]
torch = pytest.importorskip("torch")

from strands_rollout.play.options import UpdateSettings  # noqa: E402
from strands_rollout.train.policy import Policy, TokenStats  # noqa: E402
from strands_rollout.train.rollouts import TrainingSequence  # noqa: E402


@pytest.fixture(scope="module")
def slime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Yield slime's loss module, without compilation by torch."""
    if "rollout_id: int" not in (checkout() / "slime" / "utils" / "types.py").read_text():
        pytest.skip("the trainer's loss is that of slime 0.3.1 and newer: earlier ones weigh samples in another way")
    with slimes_loss(tmp_path_factory.mktemp("megatron")) as loss, torch.compiler.set_stance("force_eager"):
        yield loss


def drawn(seed: int, count: int = 5) -> list[TrainingSequence]:
    """Return sequences of many lengths with a common prefix; the second has advantage 0, masks have random gaps."""
    draw = random.Random(seed)
    prompt = [draw.randrange(1200) for _ in range(7)]
    made = []
    for number in range(count):
        mask = [1, *(int(draw.random() < 0.7) for _ in range(draw.randrange(4, 40)))]
        tokens = [*prompt, *(draw.randrange(1200) for _ in range(draw.randrange(5) + len(mask)))]
        log_probs = [-draw.expovariate(0.15) if is_trained else 0.0 for is_trained in mask]
        advantage = 0.0 if number == 1 else draw.uniform(-2, 2)
        made.append(sequence(tokens, mask, advantage=advantage, log_probs=log_probs))
    return made


def near(policy: Policy, sequences: Sequence[TrainingSequence], spread: float) -> list[TrainingSequence]:
    """Return the sequences with rollout logprobs above and below the policy's, spread by about `spread`."""
    draw = random.Random(0)
    made = []
    for one, before in zip(sequences, policy.measure(sequences), strict=True):
        own = iter(before.log_probs.tolist())
        log_probs = [min(0.0, next(own) + draw.gauss(0, spread)) if mask else 0.0 for mask in one.loss_mask]
        made.append(replace(one, log_probs=log_probs))
    return made


def their_args(settings: UpdateSettings) -> SimpleNamespace:
    return SimpleNamespace(
        loss_type="policy_loss",
        advantage_estimator="grpo",
        rollout_temperature=settings.temperature,
        rollout_top_p=1.0,
        eps_clip=settings.clip_low,
        eps_clip_high=settings.clip_high,
        eps_clip_c=None,
        entropy_coef=settings.entropy,
        use_kl_loss=settings.kl > 0,
        kl_loss_coef=settings.kl,
        kl_loss_type="low_var_kl",
        use_unbiased_kl=False,
        use_rollout_logprobs=settings.tis_clip is None,
        use_tis=settings.tis_clip is not None,
        tis_clip=settings.tis_clip,
        tis_clip_low=0,
        custom_tis_function_path=None,
        get_mismatch_metrics=False,
        use_opsm=False,
        calculate_per_token_loss=settings.mean == "token",
        recompute_loss_function=False,
        allgather_cp=False,
        log_probs_chunk_size=-1,
    )


def their_batch(sequences: Sequence[TrainingSequence], before: Sequence[TokenStats]) -> dict[str, Any]:
    """Return the sequences as a batch of slime's trainer, with values for all response tokens, masked ones too.

    `before` measures the first weights, which serve both as the weights before the update and as the reference.
    """
    own = [_on_response(one, values) for one, values in zip(sequences, before, strict=True)]
    return {
        "unconcat_tokens": [torch.tensor(one.tokens) for one in sequences],
        "total_lengths": [len(one.tokens) for one in sequences],
        "response_lengths": [len(one.loss_mask) for one in sequences],
        "loss_masks": [torch.tensor(one.loss_mask) for one in sequences],
        "rollout_mask_sums": [torch.tensor(one.denominator) for one in sequences],
        "advantages": [torch.full((len(one.loss_mask),), one.advantage) for one in sequences],
        "rollout_log_probs": [torch.tensor(one.log_probs) for one in sequences],
        "log_probs": own,
        "ref_log_probs": own,
    }


def _on_response(one: TrainingSequence, values: TokenStats) -> Any:
    """Return values for all response tokens: measured at trained tokens, arbitrary at others."""
    spread = torch.full((len(one.loss_mask),), -1.0)
    spread[torch.tensor(one.loss_mask, dtype=torch.bool)] = values.log_probs
    return spread


def gradient_of(policy: Policy) -> Any:
    return torch.cat([parameter.grad.flatten() for parameter in policy._model.parameters()])


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"mean": "token"},
        {"tis_clip": 1.5, "mean": "token"},
        {"kl": 0.3, "entropy": 0.01, "tis_clip": 1.5, "temperature": 1.3},
    ],
    ids=str,
)
def test_update_has_loss_and_gradient_of_slime(slime, changed):
    settings = UpdateSettings(**{"learning_rate": 0.0, "max_grad_norm": 1e9, "updates": 1} | changed)
    policy = Policy(MODEL, settings)
    sequences = near(policy, drawn(1), 0.3)
    # change the policy after measuring, so that ratios and divergences compare two different policies
    before = policy.measure(sequences)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy._model.parameters():
            parameter += 0.1 * parameter.abs().mean() * torch.randn_like(parameter)
    metrics = policy.update(sequences, before)
    ours = gradient_of(policy)

    policy._optimizer.zero_grad()
    logits = torch.cat([policy._model(torch.tensor([one.tokens])).logits for one in sequences], dim=1)
    args, batch = their_args(settings), their_batch(sequences, before)
    loss, tokens, _ = slime.loss_function(args, batch, 1, len(sequences), logits.float())
    theirs = loss / tokens
    theirs.backward()
    assert metrics.to_record()["loss"] == pytest.approx(float(theirs.detach()), rel=1e-4, abs=1e-6)
    assert torch.allclose(ours, gradient_of(policy), rtol=1e-3, atol=1e-5 * float(ours.abs().max()))
