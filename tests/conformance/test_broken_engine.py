"""The suite itself: each way to break the embedded engine fails tests, and each difference is told by one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from broken_engine import BREAKS, ENVIRONMENT_VARIABLE
from differences import DIFFERENCES

HERE = Path(__file__).parent
ANSWERS = "test_conformance_answers.py"
ABORTS = "test_conformance_aborts.py"
NUMBERS = "test_conformance_numbers.py"
SAMPLING = "test_conformance_sampling.py"
WEIGHTS = "test_conformance_weights.py"
LOGPROBS = (SAMPLING, "test_logprobs_are_those_of_the_whole_distribution_at_the_sampling_temperature")
LEFT_OUT = (SAMPLING, "test_no_token_is_drawn_that_the_parameters_leave_out")
FREQUENCY = (SAMPLING, "test_tokens_are_drawn_as_often_as_the_distribution_says")
SURPRISE = (SAMPLING, "test_tokens_are_as_surprising_as_the_distribution_is_uncertain")
GREEDY = (NUMBERS, "test_greedy_tokens_of_a_batch_and_their_logprobs_are_the_models")
CACHED = (NUMBERS, "test_after_a_cached_prefix_they_are_the_same")
RUNNING = (ABORTS, "test_aborting_a_running_request_returns_what_it_has")
SPANS = (WEIGHTS, "test_each_span_of_an_answer_holds_what_the_weights_of_its_version_sample")
NEW = (WEIGHTS, "test_new_weights_change_the_answer_the_version_and_empty_the_cache")
CATCHES = {
    "logprobs at temperature 1": [LOGPROBS],
    "logprobs of the narrowed distribution": [LOGPROBS],
    "logprobs of the token before": [LOGPROBS, GREEDY],
    "the stop token left out": [(ANSWERS, "test_the_models_end_token_ends_a_turn_and_stays_in_the_ids")],
    "the stop string kept": [(ANSWERS, "test_a_stop_string_leaves_the_text_and_its_tokens_stay")],
    "another abort": [RUNNING, (ABORTS, "test_abort_all_ends_every_request")],
    "an abort without its tokens": [RUNNING],
    "an abort of exactly one id": [(ABORTS, "test_an_abort_reaches_every_request_whose_id_begins_with_the_one_given")],
    "a disconnect unnoticed": [(ABORTS, "test_a_client_that_disconnects_has_its_request_aborted")],
    "the first weight version for all": [SPANS, NEW],
    "the cache kept over new weights": [NEW],
    "one cached token too many": [
        ("test_conformance_cache.py", "test_exact_repeats_and_extensions_report_what_was_cached")
    ],
    "keys and values of another prefix": [CACHED],
    "a flush while busy": [(ABORTS, "test_flushing_is_refused_while_busy")],
    "the finish's length": [("test_conformance_lengths.py", "test_a_request_without_a_limit_gets_128_tokens")],
    "one token too many": [("test_conformance_lengths.py", "test_a_request_without_a_limit_gets_128_tokens")],
    "seeds ignored": [(SAMPLING, "test_equal_seeds_give_equal_tokens_where_seeds_are_heeded")],
    "temperature ignored in sampling": [FREQUENCY, SURPRISE],
    "top p ignored": [LEFT_OUT, FREQUENCY],
    "min p ignored": [LEFT_OUT],
    "top k one too large": [LEFT_OUT],
    "penalties ignored": [LOGPROBS],
    "positions one too far when decoding": [GREEDY],
    "another id": [(ANSWERS, "test_an_answer_has_ids_and_text_and_meta_info_and_nothing_else")],
    "calls without an index": [("test_conformance_chat.py", "test_a_tool_call_is_parsed")],
}


def _failures(tests: list[tuple[str, str]], broken: str | None) -> tuple[set[str], str]:
    """The tests that failed on the embedded engine, of those given, and all that was printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "broken_engine", "-rfE", "--tb=no"]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    environment.pop(ENVIRONMENT_VARIABLE, None)
    if broken is not None:
        environment[ENVIRONMENT_VARIABLE] = broken
    nodes = [f"{HERE / module}::{test}" for module, test in tests]
    done = subprocess.run([*command, *nodes], capture_output=True, text=True, env=environment, check=False, cwd=HERE)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return set(re.findall(r"^(?:FAILED|ERROR) \S*::(\w+)", done.stdout, re.MULTILINE)), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("broken", BREAKS)
@pytest.mark.timeout(300)
def test_a_broken_engine_fails_the_tests_that_are_there_for_it(broken):
    failed, printed = _failures(CATCHES[broken], broken)
    assert failed == {test for _, test in CATCHES[broken]}, printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_same_tests_pass_on_the_engine_as_it_is():
    failed, printed = _failures(sorted({test for tests in CATCHES.values() for test in tests}), None)
    assert failed == set(), printed


def test_every_way_to_break_the_engine_has_its_tests():
    assert set(CATCHES) == set(BREAKS)


def test_every_difference_is_told_by_a_test():
    modules = ("test_conformance_differences.py", "test_fatal_requests.py")
    tests = "".join((HERE / name).read_text() for name in modules)
    assert [name for name in DIFFERENCES if f'"{name}"' not in tests] == []
