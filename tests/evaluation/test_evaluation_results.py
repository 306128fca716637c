"""What an evaluation keeps: whole lines whatever happens, one writer, one run in a folder."""

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from evaluation_stage import result_line

from strands_rollout.errors import ConfigError, RolloutError
from strands_rollout.evaluation.plan import SampleKey
from strands_rollout.evaluation.results import ResultsFile, SampleResult

PLANNED = {SampleKey("sums", 0, number) for number in range(3)}
IDENTITY = {"model": "a", "seed": None, "data_sets": {"sums": {"sha256": "00", "sampling_params": {"top_p": 1.0}}}}


def read(folder: Path) -> tuple[list[SampleResult], int]:
    with ResultsFile(folder, IDENTITY) as file:
        return list(file.results(PLANNED)), file.dropped_bytes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The results of a run that was begun."""
    read(tmp_path)
    return tmp_path / "results.jsonl"


def text(*lines: dict[str, Any]) -> str:
    return "".join(json.dumps(one) + "\n" for one in lines)


def test_what_is_appended_is_there_at_once_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    with ResultsFile(folder, IDENTITY) as file:
        kept = [file.append(result_line(number)) for number in range(2)]
        assert file.path.read_text().count("\n") == 2
        assert list(file.results(PLANNED)) == kept
        with pytest.raises(ConfigError, match="in use by another run"):
            ResultsFile(folder, IDENTITY)
    assert read(folder) == (kept, 0)
    assert kept[1].key == SampleKey("sums", 0, 1)


def test_a_half_written_last_line_is_dropped_wherever_it_was_cut(path: Path) -> None:
    whole = text(result_line(0), result_line(1)).encode()
    first = whole.index(b"\n") + 1
    for cut in (0, 1, first - 1, first, first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        results, dropped = read(path.parent)
        assert len(results) == (cut >= first)
        assert dropped == cut - (first if cut >= first else 0)
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
def test_a_line_that_is_no_result_is_named(path: Path, bad: str) -> None:
    path.write_text(text(result_line(0)) + bad + "\n")
    with pytest.raises(ConfigError, match=r"results.jsonl:2 is not a result"):
        read(path.parent)


def test_a_line_of_a_sample_that_was_not_asked_is_named(path: Path) -> None:
    path.write_text(text(result_line(0), result_line(3)))
    with pytest.raises(ConfigError, match=r"results.jsonl:2: got sample 3 .* which this run does not ask"):
        read(path.parent)


def test_a_full_disk_ends_the_run_and_what_was_written_before_is_kept(path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with ResultsFile(path.parent, IDENTITY) as file:
            file.append(result_line(0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
            with pytest.raises(RolloutError, match="can't write to .*results.jsonl"):
                file.append(result_line(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    results, dropped = read(path.parent)
    assert ([result.key.number for result in results], dropped) == ([0], 10)


def test_a_folder_that_can_not_be_used_is_a_usage_error(path: Path) -> None:
    path.write_text(text(result_line(0)))
    (path.parent / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"has no run\.json beside it"):
        read(path.parent)
    with pytest.raises(ConfigError, match="choose another folder with --out"):
        read(path / "out")
