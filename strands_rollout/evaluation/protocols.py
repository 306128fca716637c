"""Protocols: the conditions of an evaluation, fixed so that results can be compared.

A protocol fixes the sampling, the agent's settings and the text that is appended to the prompt. Results of different
protocols are never mixed: in results and reports, the name of a data set includes the protocol's name.

Sources of "qwen3":

- Qwen3 Technical Report (arXiv:2505.09388), section 4.6: the sampling parameters, the maximum lengths and the number of
  samples;
- Qwen3's model cards (huggingface.co/Qwen/Qwen3-8B, Best Practices): the texts that are appended to prompts. Also the
  maximum length in math competitions that the Technical Report does not cover.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final

from strands_rollout.errors import ConfigError
from strands_rollout.evaluation.benchmarks import Benchmark
from strands_rollout.files.json_files import read_json
from strands_rollout.play.options import Sampling
from strands_rollout.play.rows import Row
from strands_rollout.secret_mask import mask_settings
from strands_rollout.settings import RolloutSettings
from strands_rollout.slime_plugin.reward import Grading, grading_of

_REWARD_SETTINGS: Final = ("function", "evaluator", "parts", "style")
# settings of the machine, the model and the training, which a protocol leaves to the user
_NOT_FIXED: Final = frozenset(
    {
        "executor",
        "model_name",
        "tool_parser",
        "engine_patience_s",
        "max_failed_groups",
        "max_staleness",
        "max_sample_staleness",
    }
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """The conditions of an evaluation.

    Attributes:
        source: Origin of the conditions.
        sampling: Sampling of every data set, apart from the fields in `own_sampling`.
        own_sampling: By benchmark: fields of `Sampling` that differ from `sampling`.
        settings: Settings of the agent; all other settings fixed by a protocol have their defaults.
        instructions: By grading: the text that is appended to the last message of the prompt.
        excluded: By grading: the reason why the protocol can't measure such rows.
        published: By benchmark and model: numbers that were reported under these conditions, in percent.
        published_in: The publication that reports these numbers.
    """

    name: str
    source: str
    sampling: Sampling
    own_sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    instructions: Mapping[Grading, str] = field(default_factory=dict)
    excluded: Mapping[Grading, str] = field(default_factory=dict)
    published: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    published_in: str = ""

    def sampling_of(self, benchmark: Benchmark | None) -> Sampling:
        """Return the sampling of a benchmark; if `benchmark` is None, the sampling of any other data set."""
        return replace(self.sampling, **self.own_sampling.get(benchmark.name if benchmark else "", {}))

    def apply_to(self, settings: RolloutSettings) -> RolloutSettings:
        """Return `settings`, with the protocol's value for each of its settings that the user has not set."""
        unset = {name: value for name, value in self.settings.items() if name not in settings.model_fields_set}
        return settings.model_copy(update=unset)

    def with_instruction(self, row: Row) -> Row:
        """Return the row with the protocol's instruction for its grading, if any, at the end of its prompt.

        Raises:
            ConfigError: The protocol can't measure such rows.
        """
        grading = grading_of(row.metadata)
        if grading in self.excluded:
            raise ConfigError(f"the protocol {self.name} can't measure {grading}: {self.excluded[grading]}")
        instruction = self.instructions.get(grading)
        if instruction is None:
            return row
        if isinstance(row.prompt, str):
            return replace(row, prompt=f"{row.prompt}\n{instruction}")
        *earlier, last = row.prompt
        content = last["content"]  # a text, or parts with images
        is_text = isinstance(content, str)
        extended = f"{content}\n{instruction}" if is_text else [*content, {"type": "text", "text": instruction}]
        return replace(row, prompt=[*earlier, {**last, "content": extended}])

    def setting_changes(self, settings: RolloutSettings) -> list[str]:
        """Return the settings that differ from the protocol's, as text."""
        fixed, given = (_fixed_values(each) for each in (RolloutSettings(**self.settings), settings))
        return [f"the setting {name}" for name in fixed if fixed[name] != given[name]]

    def sampling_changes(self, sampling: Sampling, benchmark: Benchmark | None) -> list[str]:
        """Return the fields of a sampling that differ from the protocol's, as text."""
        own = self.sampling_of(benchmark)
        names = [each.name for each in fields(Sampling) if getattr(own, each.name) != getattr(sampling, each.name)]
        return [f"{name} {getattr(sampling, name)} instead of {getattr(own, name)}" for name in names]


def settings_identity(settings: RolloutSettings) -> dict[str, Any]:
    """Return all settings that results depend on, without secrets.

    Secrets in `reward` are masked. The options in `executor`, `tools`, `row_tools`, `agent_command` and
    `environment_config` are hashed.
    """

    def hash_options(entry: object, shown: str = "name") -> object:
        if not isinstance(entry, dict):
            return entry
        options = json.dumps({key: value for key, value in entry.items() if key != "name"}, sort_keys=True)
        checksum = hashlib.sha256(options.encode()).hexdigest()
        return {shown: mask_settings(entry.get(shown)), "options_sha256": checksum}

    without_effect = {"dump_dir", "dump_samples", "episode_workers", "journal_dir", "mismatch_check"}
    values = settings.model_dump(mode="json", exclude=without_effect)
    values["reward"] = mask_settings(values["reward"])
    tools = {name: [hash_options(tool) for tool in values[name]] for name in ("tools", "row_tools")}
    hashed = {
        "executor": hash_options(values["executor"]),
        "agent_command": hash_options(values["agent_command"], "command"),
        "environment_config": hash_options(values["environment_config"]),
    }
    return {**values, **hashed, **tools}


def _fixed_values(settings: RolloutSettings) -> dict[str, Any]:
    values = settings_identity(settings)
    reward = {f"reward.{name}": values["reward"][name] for name in _REWARD_SETTINGS}
    return {name: value for name, value in values.items() if name not in {*_NOT_FIXED, "reward"}} | reward


_AIME: Final = {"samples": 64, "max_new_tokens": 38_912}
PROTOCOLS: Final[Mapping[str, Protocol]] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            name="qwen3",
            source="Qwen3 Technical Report (arXiv:2505.09388), section 4.6, thinking mode",
            sampling=Sampling(samples=1, max_new_tokens=32_768, temperature=0.6, top_p=0.95, top_k=20),
            own_sampling={
                "aime-2024": _AIME,
                "aime-2025": _AIME,
                "hmmt-feb-2025": _AIME,
                "gpqa-diamond": {"samples": 10},
            },
            settings={"tools": (), "system_prompt": None, "enable_thinking": True},
            instructions={
                "math": "Please reason step by step, and put your final answer within \\boxed{}.",
                "choice": "Please show your choice in the `answer` field with only the choice letter, e.g., "
                '`"answer": "C"`.',
            },
            published={
                "aime-2024": {"Qwen3-8B": 76.0, "Qwen3-4B": 73.8},
                "aime-2025": {"Qwen3-8B": 67.3, "Qwen3-4B": 65.6},
                "math-500": {"Qwen3-8B": 97.4, "Qwen3-4B": 97.0},
                "gpqa-diamond": {"Qwen3-8B": 62.0, "Qwen3-4B": 55.9},
                "ifeval": {"Qwen3-8B": 85.0, "Qwen3-4B": 81.9},
            },
            published_in="Qwen3 Technical Report (arXiv:2505.09388), table 17",
        ),
        Protocol(
            name="tool",
            source="this package's own: the default agent with the code tool",
            sampling=Sampling(samples=16, max_new_tokens=16_384),
            excluded={"ifeval": "the agent's system prompt asks for an answer in \\boxed{}; use qwen3"},
        ),
    )
}


def find_protocol(name: str) -> Protocol:
    """Return the protocol with this name; for an unknown name, raise a ConfigError that lists the names."""
    if name not in PROTOCOLS:
        raise ConfigError(f"got --protocol {name!r}; expected one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS[name]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A protocol as it is used for a data set.

    Attributes:
        changes: The differences from the protocol, as text; empty if the protocol is followed exactly.
    """

    protocol: Protocol
    benchmark: Benchmark | None
    changes: tuple[str, ...]

    @property
    def label(self) -> str:
        """The protocol's name, with `+modified` if it is not followed exactly; part of the data set's name."""
        return f"{self.protocol.name}{'+modified' * bool(self.changes)}"

    @property
    def comparability(self) -> str:
        """A text with the published numbers that are comparable with the result, or with the reason why none are."""
        name = self.benchmark.name if self.benchmark else None
        published = self.protocol.published.get(name or "")
        if self.changes:
            return f"not comparable with published numbers: the protocol {self.protocol.name} is modified"
        if not self.protocol.published:
            return "no published numbers: compare with runs of the same protocol"
        if published is None:
            return f"no published numbers for {name or 'this data set'} under the protocol {self.protocol.name}"
        numbers = ", ".join(f"{model} {percent}%" for model, percent in published.items())
        return f"comparable with numbers reported in {self.protocol.published_in}: {numbers}"

    def to_json(self) -> dict[str, Any]:
        """Return the entry `protocol` of a data set in the report."""
        return {
            "name": self.protocol.name,
            "source": self.protocol.source,
            "benchmark": self.benchmark.name if self.benchmark else None,
            "modified": list(self.changes),
            "comparability": self.comparability,
        }


def refuse_several_protocols(paths: Iterable[Path]) -> None:
    """Raise a ConfigError if results of `eval` at these paths were measured under different protocols.

    Args:
        paths: Files or folders. A path is skipped if there is no `run.json` of `eval` in the folder or beside the file.
    """
    labels: dict[str, Path] = {}
    for path in paths:
        record = (path if path.is_dir() else path.parent) / "run.json"
        run = read_json(record, advice="see --help") if record.is_file() else {}
        if "data_sets" in run:
            labels[json.dumps(run.get("protocol"))] = path
    if len(labels) > 1:
        found = ", ".join(f"{path} under {json.loads(label) or 'no protocol'}" for label, path in labels.items())
        raise ConfigError(
            f"results of different protocols can't be compared: got {found}; view them one at a time, or evaluate all "
            "with the same --protocol"
        )
