"""reasoning-gym's scorers as a reward: `reward: strands_rollout.environments.reasoning_gym.score`.

`data_prep/reasoning_gym.py` writes the rows; `reasoning_gym_row` is their format. Needs the extra `reasoning-gym`.

The scorers run in the code tool's sandbox. Several scorers, such as those of `n_queens` and `countdown`, evaluate the
policy's answer as Python. Without the sandbox, this code could do anything in the process that scores.
"""

import functools
import importlib.util
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any, Final

from strands_rollout.code_tool.executors import shared_executor
from strands_rollout.environments.final_answer import final_answer
from strands_rollout.errors import ConfigError, EnvironmentFaultError, PromptError, SandboxError
from strands_rollout.settings import RolloutSettings, settings_from_args

METADATA_KEY: Final = "reasoning_gym"
"""Key in a row's metadata; its value is the metadata of the generated entry, whose `source_dataset` names the task."""
SCORE_TIMEOUT_S: Final = 20.0
_LIBRARY: Final = "reasoning_gym"
_EXECUTOR_OPTIONS: Final = ("isolation", "memory_mb", "max_concurrency", "scratch_dir", "disabled_layers")
# An answer evaluated by a scorer may print; the mark identifies the line with the result. If the scorer also fails on
# the row's own answer, the scorer is at fault.
_SCORER: Final = """
import json
answer, entry = json.loads({given!r})
try:
    from reasoning_gym.factory import get_score_answer_fn
    scorer = get_score_answer_fn(entry["metadata"]["source_dataset"])
    try:
        result = float(scorer(answer=answer, entry=entry))
    except Exception:  # a scorer may raise anything on an answer that it does not expect
        scorer(answer=entry["answer"], entry=entry)
        result = 0.0
except Exception as e:  # reported to the caller
    result = f"{{type(e).__name__}}: {{e}}"
print({mark!r}, json.dumps(result))
"""


def reasoning_gym_row(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of slime's `--prompt-data` for an entry that reasoning-gym has generated."""
    return {
        "prompt": [{"role": "user", "content": entry["question"]}],
        "label": entry["answer"],
        "metadata": {METADATA_KEY: entry["metadata"]},
    }


async def score(args: Any, sample: Any) -> dict[str, float | str]:  # noqa: ANN401 - slime's args and Sample
    """Score the final answer of a sample with the scorer of its task, from 0 to 1.

    Args:
        args: slime's args. If the setting `executor` is a `local` executor, its options `isolation`, `memory_mb`,
            `max_concurrency`, `scratch_dir` and `disabled_layers` apply here, too.
        sample: An episode of a row from `reasoning_gym_row`.

    Returns:
        `score`; `acc`, which is 1.0 for the full score, else 0.0; and `pred`, the answer. Without an answer, the score
        is 0. It is also 0 if the scorer raises an error on the answer, exceeds `SCORE_TIMEOUT_S`, or is killed by the
        sandbox.

    Raises:
        ConfigError: reasoning-gym isn't installed.
        EnvironmentFaultError: The scorer can't be imported or found, or it raises an error on the row's own answer,
            too.
        PromptError: The row's metadata has no entry of reasoning-gym.
        SandboxError: The sandbox failed.
    """
    _require_library()
    answer, entry = final_answer(sample), _entry_of(sample)
    if not answer:
        return {"score": 0.0, "acc": 0.0, "pred": ""}
    mark = secrets.token_hex(8)
    code = _SCORER.format(given=json.dumps([answer, entry]), mark=mark)
    executor = shared_executor(_executor_setting(settings_from_args(args)))
    result = await executor.run(code, timeout_s=SCORE_TIMEOUT_S)
    if result.infra_error is not None:
        raise SandboxError(f"the sandbox of reasoning-gym's scorers failed: {result.infra_error}")
    marked = [line.removeprefix(mark) for line in result.stdout.splitlines() if line.startswith(mark)]
    found = json.loads(marked[0]) if marked else 0.0
    if isinstance(found, str):
        raise EnvironmentFaultError(
            f"reasoning-gym's scorer of {entry['metadata']['source_dataset']} can't score the row: {found}. "
            "If the library can't be imported, install reasoning-gym again; otherwise write the rows again with the "
            "installed version"
        )
    value = min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0
    return {"score": value, "acc": float(value >= 1.0), "pred": answer}


def _entry_of(sample: Any) -> dict[str, Any]:  # noqa: ANN401 - slime's Sample
    metadata = (getattr(sample, "metadata", None) or {}).get(METADATA_KEY)
    if not isinstance(metadata, Mapping) or not isinstance(metadata.get("source_dataset"), str):
        raise PromptError(
            f"the row's metadata has {METADATA_KEY}={metadata!r:.100}; expected a mapping with "
            "'source_dataset', as data_prep/reasoning_gym.py writes it. With slime, set --metadata-key metadata"
        )
    return {"question": "", "answer": sample.label, "metadata": dict(metadata)}


def _executor_setting(settings: RolloutSettings) -> dict[str, Any]:
    setting = settings.executor
    own = dict(setting) if isinstance(setting, Mapping) and setting.get("name") == "local" else {}
    return {"name": "local", **{key: own[key] for key in _EXECUTOR_OPTIONS if key in own}, "libraries": [_LIBRARY]}


@functools.cache
def _require_library() -> None:
    if importlib.util.find_spec(_LIBRARY) is None:
        raise ConfigError("reasoning-gym isn't installed; run: pip install 'strands-rollout[reasoning-gym]'")
