"""Dumps of each step's samples: their contents, their number, and faults of the folder."""

from pathlib import Path
from typing import Any

import pytest
from harness import ANSWER, args_for, run

from strands_rollout import Sample, log_eval, log_rollout
from strands_rollout.dump import read_dump
from strands_rollout.slime_plugin.metrics import write_step_dump


def args(tokenizer: Any, **settings: Any) -> Any:
    return args_for("http://127.0.0.1:9", tokenizer, strands_rollout=settings)


def samples_of(*groups: int) -> list[Sample]:
    samples = []
    for index, group in enumerate(groups):
        samples.append(Sample(prompt="?", index=index, group_index=group, tokens=[5, 6, 7], response_length=1))
        samples[-1].loss_mask, samples[-1].rollout_log_probs, samples[-1].status = [1], [-0.5], Sample.Status.COMPLETED
    return samples


def indexes(path: Path) -> list[int]:
    return [record.values["index"] for record in read_dump(path)]


async def test_step_dump_is_readable_without_tokenizer(shipped_tokenizer, tmp_path) -> None:
    sample = (await run(shipped_tokenizer, [ANSWER])).sample
    run_args = args(shipped_tokenizer, dump_dir=str(tmp_path / "dump"))
    log_rollout(3, run_args, [[sample]], None, 1.0)
    log_eval(3, run_args, {"aime 2024/a": {"samples": [sample]}}, None)
    paths = sorted((tmp_path / "dump").iterdir())
    assert [path.name for path in paths] == ["eval-aime_2024-a_000003.jsonl.gz", "rollout_000003.jsonl.gz"]
    for path in paths:
        (record,) = read_dump(path)
        assert record.to_sample(Sample).to_dict() == sample.to_dict()
        text = b"".join(record.token_texts[token] for token in sample.tokens).decode()
        assert text == shipped_tokenizer.decode(sample.tokens)


@pytest.mark.parametrize(
    ("dump_samples", "written"),
    [(1, [0]), (2, [0, 1]), (3, [0, 1]), (4, [0, 1, 2, 3]), (5, [0, 1, 2, 3]), (99, list(range(6)))],
)
def test_write_step_dump_keeps_whole_groups(shipped_tokenizer, tmp_path, dump_samples, written) -> None:
    run_args = args(shipped_tokenizer, dump_dir=str(tmp_path), dump_samples=dump_samples)
    path = write_step_dump(run_args, "rollout", 0, samples_of(0, 0, 1, 1, 2, 2))
    assert path is not None
    assert indexes(path) == written


def test_unwritable_dump_dir_is_logged(shipped_tokenizer, tmp_path, caplog) -> None:
    (tmp_path / "file").write_text("")
    run_args = args(shipped_tokenizer, dump_dir=str(tmp_path / "file"))
    assert log_rollout(0, run_args, samples_of(0), None, 1.0) is False
    assert "can't write the dump" in caplog.text or "Not a directory" in caplog.text
