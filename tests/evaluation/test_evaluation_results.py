"""An evaluation's results file (whole lines, one writer, one run per folder), its report and the statistics."""

import json
import math
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import pytest
from evaluation_stage import result_line
from fake_sglang import Reply
from full_disk import limit_file_size
from harness import ids_of
from hypothesis import given, settings
from hypothesis import strategies as st

from strands_rollout.errors import ConfigError, PromptError, RolloutError
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results import (
    ResultsFile,
    SampleResult,
    accuracy_of,
    majority_vote,
    mean_pass_at_k,
    t_quantile,
)
from strands_rollout.play import player as player_module

PLANNED = {SampleKey("sums", 0, number) for number in range(3)}
IDENTITY = {"model": "a", "seed": None, "data_sets": {"sums": {"sha256": "00", "sampling_params": {"top_p": 1.0}}}}


def read(folder: Path) -> tuple[list[SampleResult], int]:
    with ResultsFile(folder, IDENTITY) as file:
        return list(file.results(PLANNED)), file.dropped_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    read(tmp_path)
    return tmp_path / "results.jsonl"


def text(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in lines)


def test_results_file_append_is_read_back_and_locked(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with ResultsFile(folder, IDENTITY) as file:
        kept = [file.append(result_line(number)) for number in range(2)]
        assert (file.path.read_text().count("\n"), list(file.results(PLANNED))) == (2, kept)
        with pytest.raises(ConfigError, match="in use by another run"):
            ResultsFile(folder, IDENTITY)
    assert (read(folder), kept[1].key) == ((kept, 0), SampleKey("sums", 0, 1))


@pytest.mark.parametrize(("acc", "is_right"), [(True, True), (1.0, True), (0.99, False), (False, False), (0.0, False)])
def test_sample_result_is_right_only_at_full_accuracy(acc: float, is_right: bool) -> None:
    result = SampleResult.from_line(result_line(0, reward={"acc": acc, "pred": "34"}))
    assert (result.is_scored, result.is_right) == (True, is_right)


def test_results_file_drops_a_half_written_last_line(path: Path) -> None:
    whole = text(result_line(0), result_line(1)).encode()
    first = whole.index(b"\n") + 1
    for cut in (0, 1, first - 1, first, first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        results, dropped = read(path.parent)
        assert (len(results), dropped) == (cut >= first, cut - (first if cut >= first else 0))
        assert path.read_bytes() == whole[:first] * (cut >= first)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        json.dumps(result_line(1, problem="0")),
        json.dumps(result_line(1, reward=None)),
        json.dumps(result_line(1, violations=[1])),
        json.dumps(result_line(1, turns=-1)),
    ],
)
def test_results_file_error_names_the_invalid_line(path: Path, bad: str) -> None:
    path.write_text(text(result_line(0)) + bad + "\n")
    with pytest.raises(ConfigError, match=r"results.jsonl:2 is not a result"):
        read(path.parent)


def test_results_file_names_a_line_of_an_unplanned_sample(path: Path) -> None:
    path.write_text(text(result_line(0), result_line(3)))
    with pytest.raises(ConfigError, match=r"results.jsonl:2: got sample 3 .* which is not part of this run"):
        read(path.parent)


def test_results_file_full_disk_keeps_earlier_lines(path: Path) -> None:
    with ResultsFile(path.parent, IDENTITY) as file:
        file.append(result_line(0))
        with (
            limit_file_size(path.stat().st_size + 10),
            pytest.raises(RolloutError, match="can't write to .*results.jsonl"),
        ):
            file.append(result_line(1))
    results, dropped = read(path.parent)
    assert ([result.key.number for result in results], dropped) == ([0], 10)


def test_results_file_refuses_an_unusable_folder(path: Path) -> None:
    path.write_text(text(result_line(0)))
    (path.parent / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"has results, but run\.json is missing, so their run is unknown"):
        read(path.parent)
    with pytest.raises(ConfigError, match="choose another folder with --out"):
        read(path / "out")


async def test_report_has_no_interval_if_all_problems_are_alike(run, shipped_tokenizer, capsys):
    wrong = Reply.tokens(ids_of(shipped_tokenizer, "So \\boxed{99}.<|im_end|>"))
    ended = await run(lambda *_: wrong)
    sums = ended.report["data_sets"]["sums"]
    assert (sums["avg_at_n"], sums["interval_95"]) == (0.0, None)
    assert "(no 95% interval: all problems have the same accuracy)" in capsys.readouterr().out


async def test_report_ungraded_samples_are_missing_and_retried(run, capsys):
    whole = await run()
    results = whole.folder / "results.jsonl"
    lines = whole.lines
    lines[3]["reward"] |= {"acc": 0.0, "method": "algebra_crash", "error": "the symbolic worker ended twice"}
    lines[5]["reward"] |= {"acc": 0.0, "method": "algebra_timeout"}
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    again = await run(lambda *_: Reply.status(400, "no"))
    sums = again.report["data_sets"]["sums"]
    assert (again.code, sums["scored"], sums["missing"]) == (1, 11, 1)
    assert len(again.fake.requests) == 1
    assert (sums["methods"]["algebra_timeout"], sum(sums["methods"].values())) == (1, 11)
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert "sums: 1 answers count as wrong because comparing them took too long" in text
    assert "1 failed samples are played again" in captured.err


def brevity(response: str, label: object) -> dict[str, float]:
    """Score by a user's own rule, which needs no label."""
    return {
        "score": 1.0 if "0" in response else 0.5,
        "words": len(response.split()),
        "labels": float(label is not None),
    }


async def test_evaluation_with_an_own_reward_needs_no_label(run, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"ask": f"What is {number} + 0?"}) + "\n" for number in range(3)))
    given = {"data": [rows], "input_key": "ask", "reward": "test_evaluation_results.brevity"}
    ended = await run(out=tmp_path / "own", **given)
    found = ended.report["data_sets"]["rows"]
    scores = [line["reward"]["score"] for line in ended.lines]
    assert (ended.code, found["scored"], found["maj_at_n"]) == (0, 12, None)
    assert found["mean_reward"] == pytest.approx(sum(scores) / 12, abs=1e-6)
    assert (found["right"], found["mean_parts"]) == (scores.count(1.0), {"parts/words": 2.0, "parts/labels": 0.0})
    assert f"mean reward {found['mean_reward']:.4g}: words 2, labels 0" in (shown := capsys.readouterr().out)
    assert ("majority" in shown, "label " in shown) == (False, False)
    with pytest.raises(ConfigError, match=r"holds another run: .*reward"):
        await run(out=tmp_path / "own", **given | {"reward": "test_evaluation_results:brevity"})
    with pytest.raises(PromptError, match="no 'label': name the label's key with --label-key, or set a"):
        await run(out=tmp_path / "graded", **given | {"reward": None})
    with pytest.raises(PromptError, match="no 'gold'"):  # a key that the user names must exist
        await run(out=tmp_path / "named", label_key="gold", **given)


async def test_evaluation_ends_when_grading_always_fails(run, monkeypatch):
    async def unavailable(args: Any, sample: Any) -> dict[str, Any]:
        error = "no symbolic worker could be started; the log says why"
        return {"score": -1.0, "acc": 0.0, "pred": "1", "label": "1", "method": "algebra_unavailable", "error": error}

    monkeypatch.setattr(player_module, "reward_func", unavailable)
    ended = await run()
    sums = ended.report["data_sets"]["sums"]
    assert (ended.code, sums["scored"], sums["avg_at_n"]) == (1, 0, None)
    assert "not graded: no symbolic worker could be started" in ended.report["session"]["stopped"]


async def test_evaluation_resumes_with_paths_written_differently(run, shipped_tokenizer, tmp_path, monkeypatch):
    tokenizer = tmp_path / "tokenizer"
    tokenizer.symlink_to(shipped_tokenizer.name_or_path)
    await run()
    monkeypatch.chdir(tmp_path)
    again = await run(tokenizer_dir=Path("tokenizer"), data=[Path("sums.jsonl")])
    assert (again.code, again.fake.requests) == (0, [])


async def test_report_counts_drift_and_mismatched_context(run, tmp_path, monkeypatch):
    right = (await run()).report
    drift = right["data_sets"]["sums"]["drift"]
    assert (drift["measured"], drift["drifted"], drift["mismatched"], drift["mismatched_tokens"]) == (12, 0, 0, 0)
    assert (drift["turn_drift"], drift["text_drift"], drift["off_policy"]) == (0, 0, 0)
    assert right["notes"] == []
    honest = player_module.generate

    async def tampering(args: Any, sample: Any, params: Any, **more: Any) -> Any:
        done = await honest(args, sample, params, **more)
        del done.tokens[len(done.tokens) - done.response_length - 1]
        spans = done.metadata["strands_rollout"]["spans"]
        done.metadata["strands_rollout"]["spans"] = [[turn, start - 1, end - 1, by] for turn, start, end, by in spans]
        return done

    monkeypatch.setattr(player_module, "generate", tampering)
    wrong = await run(out=tmp_path / "tampered")
    counts = wrong.report["data_sets"]["sums"]["drift"]
    assert (counts["measured"], counts["drifted"], counts["mismatched"]) == (12, 0, 12)
    (note,) = wrong.report["notes"]
    assert f"sums: {counts['mismatched_tokens']} context tokens in 12 of 12 samples differ from the chat" in note
    assert [line["drift"]["sampled_tokens"] for line in wrong.lines] == [line["sampled_tokens"] for line in wrong.lines]


COUNTS = st.integers(1, 8).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(deadline=None)
@given(COUNTS, st.integers(1, 8))
def test_mean_pass_at_k_equals_the_share_of_all_draws(count, k):
    right, total = count
    draws = list(combinations([1] * right + [0] * (total - right), k))
    assert mean_pass_at_k([count], k) == (pytest.approx(sum(map(any, draws)) / len(draws)) if draws else None)


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.7062), (2, 4.3027), (3, 3.1824), (10, 2.2281), (29, 2.0452), (1000, 1.9623)]
)
def test_t_quantile_equals_the_tables(degrees, t):
    assert t_quantile(degrees) == pytest.approx(t, abs=1e-4)


@settings(deadline=None)
@given(st.lists(COUNTS, min_size=2, max_size=12))
def test_accuracy_of_interval_holds_the_mean_within_0_and_1(counts):
    mean, error, interval = accuracy_of(counts)
    assert mean == pytest.approx(sum(right for right, _ in counts) / sum(total for _, total in counts))
    if len({Fraction(*count) for count in counts}) == 1:
        assert (error, interval) == (0.0, None)
    else:
        low, high = interval or (math.nan, math.nan)
        assert 0 <= low <= mean + 1e-12 <= high + 2e-12 <= 1 + 2e-12


def test_accuracy_of_more_agreeing_samples_same_interval():
    assert accuracy_of([(1, 1), (0, 1)] * 2) == accuracy_of([(64, 64), (0, 64)] * 2)


def test_accuracy_of_interval_covers_the_truth_95_percent():
    """Problems have different difficulties, drawn anew each time; the truth is their mean difficulty."""
    random = Random(1)
    held = 0
    for _ in range(500):
        chances = [random.betavariate(2, 2) for _ in range(30)]
        _, _, interval = accuracy_of([(sum(random.random() < chance for _ in range(16)), 16) for chance in chances])
        low, high = interval or (0.0, 0.0)
        held += low <= 0.5 <= high
    assert 0.93 <= held / 500 <= 0.97


@pytest.mark.parametrize(
    ("right", "wrong", "answers", "score"),
    [
        pytest.param(["5"], ["1/2", "0.5"], ["0.5"], 0.0, id="1/2 and 0.5 are equal answers"),
        pytest.param(
            ["0.5", r"\frac12", r"\frac12"], ["3"], [r"\frac12"], 1.0, id="the most frequent notation is shown"
        ),
        pytest.param([r"\sqrt{8}", r"2\sqrt{2}"], ["3", "4"], [r"\sqrt{8}"], 1.0, id="right answers are equal"),
        pytest.param(["34"], ["35", "36"], ["34", "35", "36"], 1 / 3, id="a tie is split"),
        pytest.param(["34"], ["35", "36", "35"], ["35"], 0.0, id="the majority is wrong"),
        pytest.param(["34"], ["", " ", "[INVALID]"], ["34"], 1.0, id="samples without an answer do not vote"),
        pytest.param([], [""], [], 0.0, id="no votes"),
    ],
)
def test_majority_vote(right, wrong, answers, score):
    found, share = majority_vote([*((one, True) for one in right), *((one, False) for one in wrong)])
    assert (found, share) == (answers, pytest.approx(score))
