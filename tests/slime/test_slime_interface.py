"""slime's declared interfaces: the signatures that its own tests check, and its Sample."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from slime_install import run_beside_slimes_tests

from strands_rollout import samples as sample_type

pytestmark = pytest.mark.slime


CONTRACT = """
import inspect
from plugin_contracts import test_plugin_generate_contracts as contract
from slime.utils.misc import load_function

generate = load_function("strands_rollout.generate")
contract.assert_custom_generate_signature_matches_expected(generate)
assert inspect.signature(generate).parameters["evaluation"].default is False
assert tuple(inspect.signature(load_function("strands_rollout.reward_func")).parameters)[:2] == ("args", "sample")

from plugin_contracts import test_plugin_runtime_hook_contracts as contract

[case] = [case for case in contract.HOOK_CASES if case.name == "custom_reward_post_process"]
hook = load_function("strands_rollout.normalize_rewards")
assert tuple(inspect.signature(hook).parameters) == case.expected_params
case.invoke(hook)
"""


def test_slime_signature_checks_pass(slime_package: Path) -> None:
    run_beside_slimes_tests(slime_package, CONTRACT)


@pytest.fixture
def newest_sample() -> None:
    """Skip the test with a slime before 0.3.1, whose Sample lacks fields and methods of the stand-in."""
    from slime.utils.types import Sample

    if not hasattr(Sample, "append_response_tokens"):
        pytest.skip("the stand-in is the Sample of slime 0.3.1 and newer")


@pytest.mark.usefixtures("newest_sample")
def test_sample_stand_in_has_slimes_fields_and_statuses() -> None:
    from slime.utils.types import Sample

    assert _shape(sample_type.Sample) == _shape(Sample)
    for name in ("SpecInfo", "PrefixCacheInfo"):
        assert _shape(getattr(sample_type.Sample, name)) == _shape(getattr(Sample, name))
    assert [(s.name, s.value) for s in sample_type.Sample.Status] == [(s.name, s.value) for s in Sample.Status]


@pytest.mark.usefixtures("newest_sample")
def test_sample_stand_in_appends_like_slimes() -> None:
    from slime.utils.types import Sample

    args = type("Args", (), {"sglang_speculative_algorithm": "EAGLE"})()
    meta = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "cached_tokens": 2, "weight_version": "v1"}
    speculative = {"spec_accept_token_num": 4, "spec_draft_token_num": 6, "spec_verify_ct": 2, "completion_tokens": 5}
    calls: list[dict[str, Any]] = [
        {"tokens": [4, 5], "log_probs": [-1.0, -2.0], "meta_info": {**meta, **speculative}, "text": "ab"},
        {"tokens": [6], "trainable": False},
        {"tokens": [], "log_probs": []},
        {"tokens": [7], "log_probs": [-3.0], "meta_info": {**meta, "finish_reason": {"type": "length"}}},
        {"tokens": [8], "log_probs": [-4.0], "meta_info": meta, "update_terminal_info": False},
        {"meta_info": {"finish_reason": {"type": "abort"}}},
    ]
    for count in range(len(calls) + 1):
        ours, theirs = sample_type.Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 3])
        for arguments in calls[:count]:
            ours.append_response_tokens(args, **arguments)
            theirs.append_response_tokens(args, **arguments)
        assert (ours.to_dict(), ours.effective_response_length) == (theirs.to_dict(), theirs.effective_response_length)


@pytest.mark.usefixtures("newest_sample")
def test_sample_stand_in_and_slimes_read_each_other() -> None:
    from slime.utils.types import Sample

    written = Sample(index=3, tokens=[1, 2], reward={"score": 1.0}, status=Sample.Status.TRUNCATED)
    written.prefix_cache_info.cached_tokens = 7
    written.trace = {"events": []}
    read = sample_type.Sample.from_dict(written.to_dict())
    assert (read.to_dict(), Sample.from_dict(read.to_dict())) == (written.to_dict(), written)


def _shape(kind: type) -> list[tuple[str, Any]]:
    """Return the fields in order, each with its default."""
    defaults = {}
    for item in dataclasses.fields(kind):
        made = item.default if item.default_factory is dataclasses.MISSING else item.default_factory()
        defaults[item.name] = vars(made) if dataclasses.is_dataclass(made) else getattr(made, "value", made)
    return list(defaults.items())
