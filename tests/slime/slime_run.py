"""Run slime's own rollout, evaluation and conversion to training data without Ray, like its RolloutManager.

slime is imported inside functions, since it may be absent.
"""

import asyncio
import functools
import inspect
import json
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_workers import COUNT

from strands_rollout.slime_plugin.sample_contract import contract_violations

TOOLS = ("slime_tools.multiply", "slime_tools.wait", "slime_tools.block", "slime_tools.cancel")
CONTEXT_LENGTH = 4096
# slime's arguments whose default is None, and those whose default is False
_UNSET = """
sglang_router_ip sglang_router_port sglang_dp_size prompt_data tool_key multimodal_keys rollout_max_prompt_len
dump_details buffer_filter_path rm_type rollout_max_context_len rollout_stop rollout_stop_token_ids
dynamic_sampling_filter_path rollout_sample_filter_path rollout_all_samples_process_path eval_max_prompt_len
eval_max_context_len save_debug_rollout_data load_debug_rollout_data custom_rollout_log_function_path
custom_eval_rollout_log_function_path log_reward_category sglang_speculative_algorithm
"""
_OFF = """
use_distributed_post use_fault_tolerance debug_train_only debug_rollout_only rollout_shuffle apply_chat_template
group_rm rollout_skip_special_tokens partial_rollout mask_offpolicy_in_partial_rollout use_rollout_routing_replay
ci_test log_passrate use_wandb use_tensorboard wandb_always_use_train_step balance_data balance_by_flops
disable_rollout_trim_samples use_dynamic_global_batch_size
"""


def arguments(tokenizer_folder: str, **more: Any) -> Namespace:
    """Return slime's arguments for a test: this package's functions, small sizes, and else slime's defaults."""
    values: dict[str, Any] = {
        **dict.fromkeys(_UNSET.split()),
        **dict.fromkeys(_OFF.split(), False),
        "router_policy": "consistent_hashing",
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_server_concurrency": 64,
        "hf_checkpoint": tokenizer_folder,
        "rollout_global_dataset": True,
        "rollout_seed": 42,
        "input_key": "prompt",
        "label_key": "label",
        "metadata_key": "metadata",
        "apply_chat_template_kwargs": {},
        "rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout",
        "custom_generate_function_path": "strands_rollout.generate",
        "custom_rm_path": "strands_rollout.reward_func",
        "reward_key": "score",
        "eval_reward_key": "acc",
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 4,
        "n_samples_per_prompt": 2,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 512,
        "eval_datasets": [],
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": True,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": CONTEXT_LENGTH,
        "context_parallel_size": 1,
        "rollout_data_transport": "object-store",
        "strands_rollout": {"tools": list(TOOLS)},  # added by --custom-config-path
    }
    values |= more
    if COUNT:
        values["strands_rollout"] = {**values["strands_rollout"], "episode_workers": COUNT}
    return Namespace(**values)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def chat_row(text: str, label: Any = "34") -> dict[str, Any]:
    """Return a row in the format of dapo-math-17k."""
    return {"prompt": [{"role": "user", "content": text}], "label": label}


@dataclass
class Rollouts:
    """slime's RolloutManager, reduced to what its methods read, with a record of calls and samples."""

    args: Namespace
    manager: Any = None
    groups: list[list[Any]] = field(default_factory=list)  # groups of the last training rollout, as slime got them
    calls: list[bool] = field(default_factory=list)  # `evaluation` of each call of `generate`
    # calls that changed the sampling parameters they were given
    changed_params: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)
    raised: list[BaseException] = field(default_factory=list)  # by `generate`
    returned: list[tuple[str, Any]] = field(default_factory=list)  # status at the return, and the sample
    invalid: list[str] = field(default_factory=list)  # messages for faults in samples that were returned ABORTED
    # by sample index: the length of a sample that was resumed after slime had masked all of its tokens
    masked: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from slime.ray.rollout import RolloutManager
        from slime.rollout.data_source import RolloutDataSourceWithBuffer
        from slime.utils.http_utils import init_http_client
        from slime.utils.misc import load_function

        plain_class = getattr(getattr(RolloutManager, "__ray_metadata__", None), "modified_class", RolloutManager)
        self.manager = manager = object.__new__(plain_class)
        init_http_client(self.args)
        manager.args, manager.data_source = self.args, RolloutDataSourceWithBuffer(self.args)
        manager.generate_rollout = self._recorded(load_function(self.args.rollout_function_path))
        manager.eval_generate_rollout = load_function("slime.rollout.sglang_rollout.generate_rollout")
        manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
        manager.servers, manager._health_monitors = {}, []
        parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        manager.set_train_parallel_config(parallel)

    @property
    def samples(self) -> list[Any]:
        return [sample for group in self.groups for sample in group]

    async def train(self, rollout_id: int = 0) -> list[dict[str, Any]]:
        """Run one rollout and its conversion; slime's loop runs in its own thread.

        Returns:
            The trainer's data for each data-parallel rank.
        """
        boxes = await asyncio.to_thread(self.manager.generate, rollout_id)
        return [box.inner for box in boxes]

    def returned_as(self, status: str) -> list[Any]:
        """Return the samples that `generate` returned with this status."""
        return [sample for name, sample in self.returned if name == status]

    def evaluate_on(self, *data_sets: Mapping[str, Any], **defaults: Any) -> None:
        """Set the data sets of evaluations, as slime's `--eval-config` does."""
        from slime.utils.eval_config import build_eval_dataset_configs

        self.args.eval_datasets = build_eval_dataset_configs(self.args, list(data_sets), defaults)

    async def evaluate(self, rollout_id: int = 0) -> dict[str, dict[str, Any]]:
        kept: list[Any] = []
        rollout = self.manager.eval_generate_rollout
        self.manager.eval_generate_rollout = lambda *args, **more: kept.append(rollout(*args, **more)) or kept[-1]
        await asyncio.to_thread(self.manager.eval, rollout_id)
        self.manager.eval_generate_rollout = rollout
        return dict(kept[-1].data)

    def _recorded(self, rollout: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(rollout)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            output = rollout(*args, **kwargs)
            self.groups = getattr(output, "samples", output)
            return output

        return recorded

    def watched(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function with its calls recorded."""

        @functools.wraps(generate)
        async def call(args: Any, sample: Any, sampling_params: Any, evaluation: bool = False) -> Any:
            before = json.loads(json.dumps(sampling_params))
            self.calls.append(evaluation)
            self._note_mask(sample)
            try:
                result = await generate(args, sample, sampling_params, evaluation=evaluation)
            except BaseException as e:
                self.raised.append(e)
                raise
            else:
                main = result[0] if isinstance(result, list) else result
                self.returned.append((main.status.value, main))
                self._check_aborted(main)
                return result
            finally:
                if before != sampling_params:
                    self.changed_params.append((before, dict(sampling_params)))

        assert "evaluation" in inspect.signature(call).parameters
        return call

    def _note_mask(self, sample: Any) -> None:
        metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
        if "resume" in metadata.get("strands_rollout", {}) and not any(sample.loss_mask):
            self.masked[sample.index] = len(sample.tokens)

    def _check_aborted(self, sample: Any) -> None:
        if sample.status.value == "aborted":
            words = contract_violations(sample, decode=self._decode, may_abort=True)
            self.invalid += [f"aborted sample {sample.index}: {found}" for found in words]

    def _decode(self, ids: Sequence[int]) -> str:
        from slime.rollout.sglang_rollout import GenerateState

        return str(GenerateState(self.args).tokenizer.decode(ids))


def load_dump(rollouts: Rollouts, rollout_id: int = 0) -> list[Any]:
    """Return the samples that slime wrote with torch.save."""
    from slime.utils.types import Sample

    path = rollouts.args.save_debug_rollout_data
    try:
        from slime.observability.rollout_data_utils import load_debug_rollout_data
    except ModuleNotFoundError:  # up to slime 0.3.1, a method of RolloutManager reads the file
        import torch

        dumped = torch.load(path.format(rollout_id=rollout_id), weights_only=False)["samples"]
        return [Sample.from_dict(sample) for sample in dumped]
    return list(load_debug_rollout_data(path, rollout_id=rollout_id))


def trained_tokens(rank: dict[str, Any]) -> int:
    """Slice a rank's data as slime's trainer does before its first matrix product; return the number of trained tokens.

    The shapes are from slime 0.3 (slime/backends/megatron_utils: data.py, loss.py), whose modules need Megatron.

    Raises:
        RuntimeError: From torch, if the lengths of a sample don't agree.
    """
    import torch
    from torch.nn import functional

    trained = 0
    fields = ("tokens", "response_lengths", "loss_masks", "rollout_log_probs")
    for tokens, response, *columns in zip(*(rank[name] for name in fields), strict=True):
        mask, logprobs = map(torch.as_tensor, columns)  # before 0.3.1 the trainer makes the tensors
        total = len(tokens)
        logits = torch.zeros(total, 4)
        # the logits that predict the response begin one token before it
        assert len(logits.narrow(0, total - response - 1, response)) == response
        assert len(functional.pad(mask, (total - response - 1, 1))) == total
        assert len(tokens[-response:]) == len(mask) == len(logprobs) == response
        assert bool(torch.isfinite(logprobs).all())
        assert set(mask.tolist()) <= {0, 1}
        assert bool((logprobs[mask == 0] == 0).all())
        trained += int(mask.sum())
    return trained
