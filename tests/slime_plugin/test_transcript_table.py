"""`transcript_rows`: the selection of a step's samples, and the columns and lengths of the rows."""

from typing import Any

from strands_rollout import Sample
from strands_rollout.samples import finished_samples
from strands_rollout.slime_plugin.metrics import (
    COLUMNS,
    MAX_LABEL_CHARS,
    MAX_PROMPT_CHARS,
    MAX_RESPONSE_CHARS,
    MAX_ROWS,
    transcript_rows,
)


def rows_of(samples: list[Any], reward_key: str | None = None) -> list[dict[str, Any]]:
    rows = transcript_rows(finished_samples(samples), step=3, reward_key=reward_key)
    return [dict(zip(COLUMNS, row, strict=True)) for row in rows]


def sample(index: int, reward: Any = 0.0, status: str = "completed", length: int = 1, **facts: Any) -> Sample:
    return Sample(
        index=index,
        reward=reward,
        status=Sample.Status(status),
        response_length=length,
        metadata={"strands_rollout": facts},
    )


def test_transcript_rows_say_why_they_are_shown() -> None:
    samples = [
        *(sample(0, 0.5), sample(1, 1.0)),
        sample(2, -1.0, status="truncated", length=90),
        sample(3, -0.5, status="failed"),
        sample(4, 0.0, duration_s=8.0),
        sample(5, 0.2, tool_calls=5),
        sample(6, 0.1),
        *(sample(index, 0.3) for index in range(7, 30)),
    ]
    rows = {row["index"]: row["why"] for row in rows_of(samples)}
    assert len(rows) == MAX_ROWS
    assert {index: why for index, why in rows.items() if why} == {
        1: "best",
        2: "worst, truncated, longest",
        3: "failed",
        4: "slowest",
        5: "most tool calls",
        17: "median",  # 14 rewards are smaller or earlier, 14 larger or later; the failed sample's does not count
    }


def test_transcript_rows_select_samples_evenly() -> None:
    assert [row["index"] for row in rows_of([sample(2, 1.0), sample(0, 3.0), sample(1, 2.0)])] == [2, 0, 1]
    assert rows_of([]) == []
    equals = rows_of([sample(index, 1.0) for index in range(29)])
    assert {row["index"]: row["why"] for row in equals if row["why"]} == {0: "best, worst, longest", 14: "median"}
    assert [row["index"] for row in equals] == [0, 1, 5, 10, 14, 15, 20, 24]
    no_numbers = rows_of([sample(0, reward) for reward in (None, "much", float("nan"), {"acc": 1.0}, [1.0])], "score")
    assert [row["reward"] for row in no_numbers] == [None] * 5
    (row,) = rows_of([object()])
    assert {name: value for name, value in row.items() if value not in (None, "")} == {"step": 3}


def test_transcript_rows_describe_the_sample() -> None:
    done = sample(7, {"score": 1.0}, "truncated", stop_reason="turn_length", turns=2, tool_calls=1)
    done.metadata["strands_rollout"]["weight_versions"] = ["8", None, "9"]
    done.group_index, done.prompt, done.response, done.label = 3, "What?", "This.", ["34", 34]
    (row,) = rows_of([done], "score")
    del row["why"]
    assert row == {
        **dict(zip(("step", "index", "group", "turns", "tool calls"), (3, 7, 3, 2, 1), strict=True)),
        "status": "truncated",
        "stop reason": "turn_length",
        "reward": 1.0,
        "weight versions": "8, 9",
        "prompt": "What?",
        "response": "This.",
        "label": '["34", 34]',
    }


def test_transcript_rows_cut_the_middle_of_long_texts() -> None:
    text = "head" + "x" * 100_000 + "tail"
    (row,) = rows_of([Sample(prompt=text, response=text, label=text)])
    for name, limit in (("prompt", MAX_PROMPT_CHARS), ("response", MAX_RESPONSE_CHARS), ("label", MAX_LABEL_CHARS)):
        assert limit <= len(row[name]) <= limit + 50
        assert row[name].startswith("head")
        assert row[name].endswith("tail")
        assert f"{len(text) - limit} characters dropped" in row[name]
