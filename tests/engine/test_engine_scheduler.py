"""What befalls a generation between two chunks of its prompt, step by step and without threads; its weight spans."""

import pytest

from strands_rollout.engine.generation import Generation
from strands_rollout.engine.qwen3 import Qwen3, load_weights, read_model_config
from strands_rollout.engine.requests import GenerateRequest, SamplingParams
from strands_rollout.engine.scheduler import Scheduler

CHUNK = 16


@pytest.fixture
def scheduler(tiny_dir) -> Scheduler:
    config = read_model_config(tiny_dir)
    return Scheduler(
        Qwen3(config, load_weights(tiny_dir, config), 512),
        context_length=512,
        max_running=4,
        prefill_chunk=CHUNK,
        cache_tokens=1000,
        seeds=lambda: 1,
        decode=lambda ids: str(ids),
    )


def _submitted(scheduler: Scheduler, prompt_tokens: int, max_new_tokens: int = 100) -> Generation:
    request = GenerateRequest("r", tuple(range(prompt_tokens)), SamplingParams(ignore_eos=True), max_new_tokens)
    generation = Generation(request, lambda: None)
    scheduler.submit(generation)
    return generation


def _retracted_in_mid_prompt(scheduler: Scheduler) -> Generation:
    """A generation of 60 tokens that was retracted, and has begun to prefill again."""
    generation = _submitted(scheduler, CHUNK)
    for _ in range(60):
        scheduler.step()
    scheduler.pause("retract")
    assert scheduler.flush()
    scheduler.resume()
    scheduler.step()
    assert (scheduler.counts(), len(generation.output_ids)) == ((1, 0), 60)
    return generation


def _spans(generation: Generation) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.weight_spans]


@pytest.mark.parametrize("paused", [False, True])
def test_an_abort_between_two_chunks_counts_as_one_in_the_queue_and_waits_for_the_end_of_a_pause(scheduler, paused):
    generation = _submitted(scheduler, 3 * CHUNK)
    scheduler.step()
    if paused:
        scheduler.pause("in_place")
    scheduler.abort("r")
    if paused:
        assert (generation.finish, scheduler.has_work()) == (None, False)
        scheduler.resume()
    scheduler.step()
    assert generation.output("default").ended_in_queue
    assert (generation.output_ids, scheduler.counts(), scheduler.has_work()) == ([], (0, 0), False)


def test_a_long_prompt_does_not_stall_a_running_generation(scheduler):
    running = _submitted(scheduler, 3)
    scheduler.step()
    waiting, steps = _submitted(scheduler, 20 * CHUNK, max_new_tokens=1), 0
    while waiting.finish is None:
        scheduler.step()
        steps += 1
    scheduler.end_all()
    assert (steps, len(running.output_ids)) == (20, 1 + 20)


def test_new_weights_for_what_prefills_again_begin_a_span(scheduler, other_dir):
    generation = _retracted_in_mid_prompt(scheduler)
    scheduler.pause("in_place")
    scheduler.replace_weights(load_weights(other_dir, read_model_config(other_dir)), "v2")
    scheduler.resume()
    while scheduler.has_work():
        scheduler.step()
    assert _spans(generation) == [("default", 0, 60), ("v2", 60, 100)]


def test_an_update_that_waits_is_made_when_a_pause_that_came_after_it_is_over(scheduler):
    generation = _submitted(scheduler, CHUNK, max_new_tokens=3)
    scheduler.step()
    made = []
    scheduler.when_idle_or_paused(lambda _: made.append(generation.finish))
    scheduler.pause("in_place")
    scheduler.settle()
    assert made == []
    scheduler.resume()
    while scheduler.has_work():
        scheduler.step()
    scheduler.settle()
    assert made == [{"type": "length", "length": 3}]


@pytest.mark.parametrize(
    ("changes", "output_count", "spans"),
    [
        ([], 0, [("now", 0, 0)]),
        ([], 7, [("now", 0, 7)]),
        ([("a", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("a", 3), ("b", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("a", 3)], 3, [("a", 0, 3)]),
        ([("now", 3), ("b", 3)], 7, [("now", 0, 7)]),
        ([("now", 3), ("b", 5)], 7, [("now", 0, 3), ("b", 3, 5), ("now", 5, 7)]),
    ],
)
def test_spans_cover_the_output_in_order_without_empty_ones(changes, output_count, spans):
    generation = Generation(GenerateRequest("r", (1,), SamplingParams(), 9), lambda: None)
    for version, count in (*changes, ("now", output_count)):
        generation.close_span(version, count)
    assert _spans(generation) == spans
