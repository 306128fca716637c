"""`Scheduler` step by step without threads: chunks of long prompts; weight spans of a generation."""

import pytest

from strands_rollout.engine.generation import InFlightGeneration
from strands_rollout.engine.qwen3 import Qwen3, load_weights, read_model_config
from strands_rollout.engine.requests import EngineRequest, SamplingParams
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


def _submitted(scheduler: Scheduler, prompt_tokens: int, max_new_tokens: int = 100) -> InFlightGeneration:
    request = EngineRequest("r", tuple(range(prompt_tokens)), SamplingParams(ignore_eos=True), max_new_tokens)
    generation = InFlightGeneration(request, lambda: None)
    scheduler.submit(generation)
    return generation


def _spans(generation: InFlightGeneration) -> list[tuple[str, int, int]]:
    return [(span.version, span.start, span.end) for span in generation.weight_spans]


def test_scheduler_long_prompt_does_not_stall_generation(scheduler):
    running = _submitted(scheduler, 3)
    scheduler.step()
    waiting, steps = _submitted(scheduler, 20 * CHUNK, max_new_tokens=1), 0
    while waiting.finish is None and steps < 100:
        scheduler.step()
        steps += 1
    scheduler.abort_all()
    assert (steps, len(running.output_ids)) == (20, 1 + 20)


@pytest.mark.parametrize(
    ("changes", "output_count", "spans"),
    [
        ([], 7, [("now", 0, 7)]),
        ([("a", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("a", 3), ("b", 3)], 7, [("a", 0, 3), ("now", 3, 7)]),
        ([("now", 3), ("b", 5)], 7, [("now", 0, 3), ("b", 3, 5), ("now", 5, 7)]),
    ],
)
def test_weight_spans_cover_the_output_without_empty_spans(changes, output_count, spans):
    generation = InFlightGeneration(EngineRequest("r", (1,), SamplingParams(), 9), lambda: None)
    for version, count in (*changes, ("now", output_count)):
        generation.close_span(version, count)
    assert _spans(generation) == spans
