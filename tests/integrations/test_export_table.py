"""Samples as rows of a table: lossless Parquet files and data sets."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from finished import documented_block, two_samples
from grouped_samples import sample_of

from strands_rollout.errors import ExportError
from strands_rollout.integrations.table import read_parquet, to_parquet, to_rows
from strands_rollout.samples import Sample

LEFT_OUT = {
    "multimodal_inputs",
    "multimodal_train_inputs",
    "multimodal_train_input_id",
    "apply_chat_template_kwargs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
    "teacher_log_probs",
    "generate_function_path",
    "custom_rm_path",
    "train_metadata",
    "session_id",
    "non_generation_time",
    "spec_info",
    "prefix_cache_info",
}
"""Fields without a column: state of an engine or of slime while a sample is made, and data of other modalities."""


def assert_same(read: list[Sample], samples: list[Any]) -> None:
    for one, sample in zip(read, samples, strict=True):
        for field in fields(Sample):
            if field.name not in LEFT_OUT:
                assert getattr(one, field.name) == getattr(sample, field.name), field.name


async def test_to_parquet_and_read_parquet_keep_every_field(shipped_tokenizer: Any, tmp_path: Path) -> None:
    samples = await two_samples(shipped_tokenizer)
    samples[0].metadata["note"] = {"text": "ünï\n", "number": 0.1, "none": None, "list": [1, [2]]}
    samples[0].group_index, samples[0].rollout_id = 3, 5
    samples[0].rollout_log_probs[0] = -0.1  # float32 cannot hold this value
    samples.append(sample_of(-1.0, status="FAILED", removed=True))
    to_parquet(samples, tmp_path / "rollouts.parquet")
    assert_same(read_parquet(tmp_path / "rollouts.parquet"), samples)


async def test_to_parquet_documented_example_runs(shipped_tokenizer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"samples": await two_samples(shipped_tokenizer)}
    exec(documented_block("to_parquet"), names)
    assert_same(names["read_parquet"](Path("rollouts.parquet")), names["samples"])
    assert len(names["output"]["rewards"]) == len(names["loop_outputs"]) == len(names["dataset"]) == 2


@pytest.mark.parametrize("value", [{1: "a"}, (1, 2), {1, 2}, float("nan"), b"a"])
def test_to_rows_names_metadata_that_json_cannot_keep(value: Any) -> None:
    bad = sample_of(1.0, index=9)
    bad.metadata["mine"] = value
    with pytest.raises(ExportError, match=r"sample 1 \(index=9\): its metadata"):
        to_rows([sample_of(1.0), bad])


def test_to_parquet_refuses_a_bad_sample_by_its_index(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"sample 0 \(index=4\) .*status is aborted"):
        to_parquet([sample_of(1.0, index=4, status="ABORTED")], tmp_path / "rollouts.parquet")
    assert list(tmp_path.iterdir()) == []
    to_parquet([sample_of(1.0)], tmp_path / "rollouts.parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.parquet"]
    with pytest.raises(ExportError, match="can't write .*nowhere"):
        to_parquet([sample_of(1.0)], tmp_path / "nowhere" / "rollouts.parquet")
