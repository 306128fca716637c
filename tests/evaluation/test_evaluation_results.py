"""What an evaluation keeps: whole lines whatever happens, one writer, one run in a folder."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results import ResultsFile, RunFolder, SampleResult


def line(number: int, **changes: Any) -> dict[str, Any]:
    made = {
        "data_set": "sums",
        "problem": 0,
        "number": number,
        "status": "completed",
        "stop_reason": "completed",
        "error": None,
        "reward": {"acc": 1.0, "pred": "34"},
        "response": "34\n" * 3,
        "response_tokens": 5,
        "sampled_tokens": 4,
        "turns": 1,
        "tool_calls": 0,
        "tool_errors": 0,
        "seconds": 0.5,
        "weight_versions": ["1"],
        "violations": [],
        "audited": False,
    }
    return {**made, **changes}


PLANNED = {SampleKey("sums", 0, number) for number in range(3)}


def read(path: Path) -> tuple[list[SampleResult], int]:
    with ResultsFile(path) as file:
        return list(file.results(PLANNED)), file.dropped_bytes


def test_what_is_appended_is_there_at_once_and_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path) as file:
        kept = [file.append(line(number)) for number in range(2)]
        assert path.read_text().count("\n") == 2
        assert list(file.results(PLANNED)) == kept
    assert read(path) == (kept, 0)
    assert kept[1].key == SampleKey("sums", 0, 1)


def test_a_half_written_last_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path) as file:
        for number in range(2):
            file.append(line(number))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        results, dropped = read(path)
        assert len(results) == (cut >= first)
        assert dropped == cut - (first if cut >= first else 0)
        assert path.read_bytes() == whole[:first] * (cut >= first)


def test_a_half_line_longer_than_what_is_read_at_once_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(json.dumps(line(0)).encode() + b"\n" + b"x" * 200_000)
    results, dropped = read(path)
    assert (len(results), dropped) == (1, 200_000)


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "{}",
        json.dumps(line(1, problem="one")),
        json.dumps(line(1, problem="0")),
        json.dumps(line(True)),
        json.dumps(line(1, reward=None)),
        json.dumps(line(1, reward={"acc": 0.5})),
        json.dumps(line(1, reward={"acc": "no"})),
        json.dumps(line(1, violations="none")),
        json.dumps(line(1, violations=[1])),
        json.dumps(line(1, turns=-1)),
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(line(0)) + "\n" + bad + "\n")
    with pytest.raises(ConfigError, match=r"results.jsonl:2 is not a result"):
        read(path)


def test_a_line_of_a_sample_that_was_not_asked_is_named(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    for other in (line(3), line(0, problem=1), line(0, data_set="more")):
        path.write_text(json.dumps(line(0)) + "\n" + json.dumps(other) + "\n")
        with pytest.raises(ConfigError, match=r"results.jsonl:2: got sample .* which this run does not ask"):
            read(path)


def test_blank_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("\n" + json.dumps(line(0)) + "\n  \n" + json.dumps(line(1)) + "\n\n")
    assert [result.key.number for result in read(path)[0]] == [0, 1]


def test_what_is_no_plain_json_is_kept_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path) as file:
        file.append(line(0, label=10**30, sample={"where": Path("a")}))
    assert json.loads(path.read_text())["label"] == 10**30
    assert len(read(path)[0]) == 1


@pytest.mark.parametrize(
    ("reward", "is_scored"),
    [
        ({"acc": 0.0, "method": "algebra_timeout", "error": ""}, True),
        ({"acc": False, "method": "integers"}, True),
        ({"acc": 0.0, "method": "algebra_unavailable", "error": "no symbolic worker could be started"}, False),
        ({"acc": 0.0, "method": "error", "error": "ValidationError: x"}, False),
    ],
)
def test_what_could_not_be_graded_is_not_scored(reward: dict[str, Any], is_scored: bool) -> None:
    result = SampleResult.from_line(line(0, reward=reward))
    assert (result.is_scored, result.fault is None) == (is_scored, is_scored)


def test_a_file_has_one_writer_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    with ResultsFile(path), pytest.raises(ConfigError, match="in use by another run"):
        ResultsFile(path)
    assert read(path) == ([], 0)


def test_a_full_disk_ends_the_run_and_what_was_written_before_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with ResultsFile(path) as file:
            file.append(line(0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
            with pytest.raises(RolloutError, match="can't write to .*results.jsonl"):
                file.append(line(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    results, dropped = read(path)
    assert ([result.key.number for result in results], dropped) == ([0], 10)


IDENTITY = {"model": "a", "seed": None, "data_sets": {"sums": {"sha256": "00", "sampling_params": {"top_p": 1.0}}}}


def test_a_folder_is_gone_on_with_by_the_same_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "deep" / "run")
    with folder.open_results(IDENTITY) as file:
        file.append(line(0))
    with folder.open_results(IDENTITY) as file:
        assert len(list(file.results(PLANNED))) == 1


def test_a_folder_of_another_run_is_refused_and_each_difference_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.open_results(IDENTITY) as file:
        file.append(line(0))
    other = {
        "model": "b",
        "seed": 0,
        "data_sets": {"sums": {"sha256": "00", "sampling_params": {"top_p": 0.9}}, "x": 1},
    }
    with pytest.raises(ConfigError) as caught:
        folder.open_results(other)
    words = str(caught.value)
    assert "model was 'a' and is 'b'" in words
    assert "seed was None and is 0" in words
    assert "data_sets.sums.sampling_params.top_p was 1.0 and is 0.9" in words
    assert "data_sets.x was 'nothing' and is 1" in words
    assert "sha256" not in words
    # the refused one holds nothing
    with folder.open_results(IDENTITY):
        pass


def test_a_folder_without_results_is_taken_over_by_another_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.open_results(IDENTITY).__exit__(None, None, None)
    with folder.open_results({**IDENTITY, "model": "b"}) as file:
        file.append(line(0))
    assert json.loads(folder.run_path.read_text())["model"] == "b"
    with pytest.raises(ConfigError, match="model was 'b' and is 'a'"):
        folder.open_results(IDENTITY)


def test_results_without_a_record_of_their_run_are_refused(tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(line(0)) + "\n")
    with pytest.raises(ConfigError, match=r"has no run\.json beside it"):
        RunFolder(tmp_path).open_results(IDENTITY)


def test_a_folder_that_can_not_be_made_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose another folder with --out"):
        RunFolder(tmp_path / "file" / "out").open_results(IDENTITY)
