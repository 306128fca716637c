"""Loss, gradient and advantages equal those of slime's own functions, on ragged sequences with gaps in their masks."""

import ast
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sequences import MODEL, sequence
from slime_loss import checkout, slimes_loss

pytestmark = [pytest.mark.slime, pytest.mark.torch]
torch = pytest.importorskip("torch")

from strands_rollout import Sample, normalize_rewards  # noqa: E402
from strands_rollout.train.batch import TrainingMethod, TrainingSequence  # noqa: E402
from strands_rollout.train.options import UpdateSettings  # noqa: E402
from strands_rollout.train.policy import Measured, Policy, clipped_policy_loss  # noqa: E402


@pytest.fixture(scope="module")
def slime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """slime's loss module; torch compiles none of it."""
    if "rollout_id: int" not in (checkout() / "slime" / "utils" / "types.py").read_text():
        pytest.skip("the trainer's loss is that of slime 0.3.1 and newer: earlier ones weigh samples in another way")
    with slimes_loss(tmp_path_factory.mktemp("megatron")) as loss, torch.compiler.set_stance("force_eager"):
        yield loss


def drawn(seed: int, count: int = 5) -> list[TrainingSequence]:
    """Sequences of many lengths with one prompt's beginning in common; some have no advantage, all have gaps."""
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
    """The same, with rollout logprobs that differ from the policy's by about so much, to both sides of the clip."""
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


def their_batch(sequences: Sequence[TrainingSequence], before: Sequence[Measured]) -> dict[str, Any]:
    """The sequences as slime's trainer holds them: values for all response tokens, masked ones too.

    The first weights are both those from before the update and the reference.
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


def _on_response(one: TrainingSequence, values: Measured) -> Any:
    """Known where it is trained, and anything where it is not."""
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
        {"tis_clip": 1.5},
        {"tis_clip": 1.5, "mean": "token"},
        {"kl": 0.3},
        {"entropy": 0.01},
        {"temperature": 0.7},
        {"kl": 0.3, "entropy": 0.01, "tis_clip": 1.5, "temperature": 1.3},
    ],
    ids=str,
)
def test_an_update_has_the_loss_and_gradient_of_slimes_own(slime, changed):
    settings = UpdateSettings(**{"learning_rate": 0.0, "max_grad_norm": 1e9, "updates": 1} | changed)
    policy = Policy(MODEL, settings)
    sequences = near(policy, drawn(1), 0.3)
    # the policy moves on from what measured: ratios and divergences are of two policies, not of one
    before = policy.measure(sequences)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy._model.parameters():
            parameter += 0.1 * parameter.abs().mean() * torch.randn_like(parameter)
    figures = policy.update(sequences, before)
    ours = gradient_of(policy)

    policy._optimizer.zero_grad()
    logits = torch.cat([policy._model(torch.tensor([one.tokens])).logits for one in sequences], dim=1)
    args, batch = their_args(settings), their_batch(sequences, before)
    loss, tokens, _ = slime.loss_function(args, batch, 1, len(sequences), logits.float())
    theirs = loss / tokens
    theirs.backward()
    assert figures.to_record()["loss"] == pytest.approx(float(theirs.detach()), rel=1e-4, abs=1e-6)
    assert torch.allclose(ours, gradient_of(policy), rtol=1e-3, atol=1e-5 * float(ours.abs().max()))


def test_each_tokens_clipping_is_slimes_own(slime):
    generator = torch.Generator().manual_seed(0)
    log_ratio, advantages = (torch.randn(500, generator=generator) for _ in range(2))
    ours = clipped_policy_loss(log_ratio, advantages, 0.2, 0.28)
    theirs = slime.compute_policy_loss(-log_ratio, advantages, 0.2, 0.28)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    assert 0 < float(ours[1].mean()) < 1


def slimes_manager(name: str) -> Callable[..., Any]:
    """A method of slime's rollout manager, out of its file: the file itself needs Ray."""
    tree = ast.parse((checkout() / "slime/ray/rollout.py").read_text())
    [found] = [node for node in ast.walk(tree) if getattr(node, "name", None) == name]
    names: dict[str, Any] = {"torch": torch, "Sample": Sample, "get_source": lambda sample: None}
    exec(compile(ast.Module([found], []), "slime", "exec"), names)
    return names[name]


@pytest.mark.parametrize("seed", range(2))
def test_advantages_are_the_rewards_that_slime_gives_each_token(slime, shipped_tokenizer, seed):
    draw, groups = random.Random(seed), []
    for number in range(4):
        groups.append([Sample(group_index=number, index=8 * number + at, tokens=[1, 2, 3]) for at in range(8)])
        for sample in groups[-1]:
            sample.response_length, sample.loss_mask, sample.rollout_log_probs = 2, [1, 1], [-1.0, -2.0]
            sample.reward = {"score": 1.0 if number == 0 else draw.choice([-1.0, 1.0, draw.uniform(-1, 1)])}
    batch = TrainingMethod().batch(groups, shipped_tokenizer)
    args = SimpleNamespace(
        reward_key="score",
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        n_samples_per_prompt=8,
        rollout_batch_size=4,
    )
    manager = SimpleNamespace(args=args, custom_reward_post_process_func=None)
    _, rewards = slimes_manager("_post_process_rewards")(manager, batch.samples)
    theirs = slime.get_grpo_returns(torch.tensor(rewards), [torch.zeros(2)] * len(rewards))
    assert batch.dropped_groups == 1
    ours = [torch.full((2,), one.advantage) for one in batch.sequences]
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(ours, theirs, strict=True))


def fan_outs(policy: Policy) -> list[list[Sample]]:
    """Two groups of four rollouts, each of one to four samples."""
    draw = random.Random(3)
    return [
        [sibling for at in range(4) for sibling in _fan_out(policy, draw, group, 4 * group + at)] for group in range(2)
    ]


def _fan_out(policy: Policy, draw: random.Random, group: int, index: int) -> list[Sample]:
    reward, made = {"score": draw.uniform(-1, 1), "acc": 0.0}, []
    count = draw.randrange(1, 5)
    for part, one in enumerate(near(policy, drawn(draw.randrange(1000), count), 0.3)):
        facts = {"fan_out": {"part": part, "of": count}}
        made.append(Sample(group_index=group, index=index, rollout_id=index, tokens=one.tokens, reward=reward))
        made[-1].metadata = {"strands_rollout": facts}
        made[-1].response_length, made[-1].loss_mask = len(one.loss_mask), one.loss_mask
        made[-1].rollout_log_probs, made[-1].status = one.log_probs, Sample.Status.COMPLETED
    return made


@pytest.mark.parametrize("mean", ["sample", "token"])
@pytest.mark.parametrize("updates", [1, 2])
def test_siblings_are_batched_and_weighed_as_by_slimes_own_trainer(slime, shipped_tokenizer, updates, mean):
    """From samples to the last optimizer step's gradient; slime's micro-batches part siblings."""
    settings = UpdateSettings(learning_rate=0.0, max_grad_norm=1e9, updates=updates, mean=mean)  # type: ignore[arg-type]
    policy = Policy(MODEL, settings)
    groups = fan_outs(policy)
    if mean == "sample":  # in a mean over tokens, slime counts a sample that trains none as one token
        groups[0][-1].loss_mask, groups[0][-1].remove_sample = [0] * groups[0][-1].response_length, True
    batch = TrainingMethod().batch(groups, shipped_tokenizer)
    figures = policy.update(batch.sequences, policy.measure(batch.sequences))
    ours = gradient_of(policy)

    args = their_args(settings)
    vars(args).update(use_dynamic_batch_size=True, max_tokens_per_gpu=60, balance_by_flops=False, balance_data=False)
    manager = SimpleNamespace(
        args=args,
        custom_convert_samples_to_train_data_func=None,
        _post_process_rewards=lambda samples: normalize_rewards(SimpleNamespace(reward_key="score"), samples),
    )
    data = slimes_manager("_convert_samples_to_train_data")(manager, batch.samples)
    assert len(data["tokens"]) == len(batch.sequences) + (mean == "sample") > 8
    parallel = {"dp_size": 1, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    schedule = importlib.import_module("slime.utils.dp_schedule").build_dp_schedule
    [places], [micro_batches], counts, rollouts = schedule(
        args,
        parallel,
        [len(tokens) for tokens in data["tokens"]],
        global_batch_size=8 // updates,
        rollout_indices=data["rollout_ids"],
    )
    assert rollouts == [8 // updates] * updates
    batches, losses = iter(micro_batches), []
    for count in counts:
        assert count > rollouts[0] // 2
        policy._optimizer.zero_grad()
        losses.append(
            _one_step(slime, policy, args, data, [[places[at] for at in next(batches)] for _ in range(count)])
        )
    assert figures.to_record()["loss"] == pytest.approx(sum(losses) / updates, rel=1e-4, abs=1e-6)
    assert torch.allclose(ours, gradient_of(policy), rtol=1e-3, atol=1e-5 * float(ours.abs().max()))


def _one_step(slime: Any, policy: Policy, args: Any, data: Any, micro_batches: list[list[int]]) -> float:
    """slime's loss of one optimizer step, its gradient left on the policy; Megatron divides by the micro-batches."""
    losses, tokens, rollouts = [], 0, len({data["rollout_ids"][at] for one in micro_batches for at in one})
    for chosen in micro_batches:
        picked = {name: [values[at] for at in chosen] for name, values in data.items() if name != "source_names"}
        masks = list(map(torch.tensor, picked["loss_masks"]))
        their = {
            "unconcat_tokens": list(map(torch.tensor, picked["tokens"])),
            "total_lengths": list(map(len, picked["tokens"])),
            "response_lengths": picked["response_lengths"],
            "loss_masks": masks,
            "rollout_mask_sums": list(map(torch.tensor, picked["rollout_mask_sums"])),
            "advantages": slime.get_grpo_returns(torch.tensor(picked["rewards"]), masks),
            "rollout_log_probs": list(map(torch.tensor, picked["rollout_log_probs"])),
            "log_probs": [torch.zeros(len(mask)) for mask in masks],
        }
        logits = torch.cat([policy._model(torch.tensor([ids])).logits for ids in picked["tokens"]], dim=1)
        loss, of_tokens, _ = slime.loss_function(args, their, len(micro_batches), rollouts, logits.float())
        losses.append(loss if args.calculate_per_token_loss else loss / len(micro_batches))
        tokens += int(of_tokens) if args.calculate_per_token_loss else 0
    total = sum(losses[1:], losses[0]) / (tokens or 1)
    total.backward()
    return float(total.detach())
