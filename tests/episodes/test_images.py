"""Images in prompts and tool results: the trajectory has the tokens that the model's processor makes."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs Pillow: the extra [images]")

from fake_sglang import FakeSGLang, Reply
from harness import ANSWER, args_for, call_text, ids_of
from strands import Agent, tool
from strands.agent.conversation_manager import NullConversationManager
from strands.types.exceptions import EventLoopException
from vision import (
    FAMILIES,
    TEMPLATE,
    VisionEngine,
    encoded,
    image_block,
    picture,
    save_llava,
    vision_processor,
    vision_tokenizer,
)

from strands_rollout import Sample, SGLangModel, errors, generate
from strands_rollout.integrations.conversion import finished_episodes
from strands_rollout.integrations.verl import to_agent_loop_outputs
from strands_rollout.model import images
from strands_rollout.model.images import image_block as make_image_block
from strands_rollout.play.audit import record_wire, tito_violations
from strands_rollout.record.tokens import Trajectory
from strands_rollout.slime_plugin.inputs import to_episode_prompt

CALL = call_text("a dot", name="draw")
QUESTION = [image_block(picture(100, 70, seed=1)), {"text": "What is it?"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return vision_tokenizer()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    return vision_processor(request.param, tokenizer)


@pytest.fixture(scope="module")
def processor(tokenizer: Any) -> Any:
    return vision_processor("Qwen2_5_VLProcessor", tokenizer)


@tool
def draw(code: str) -> dict[str, Any]:
    """Draw two images."""
    content = [{"text": f"{code}:"}, image_block(picture(60, 90, seed=2)), image_block(picture(seed=3, mode="RGBA"))]
    return {"status": "success", "content": content}


@tool
def repeat(code: str) -> str:
    """Repeat the code 100 times."""
    return f"{code} " * 100


async def ask(model: SGLangModel, prompt: Any = QUESTION) -> None:
    agent = Agent(
        model=model, tools=[draw, repeat], callback_handler=None, conversation_manager=NullConversationManager()
    )
    await agent.invoke_async(prompt)


async def played(processor: Any, turns: list[str], prompt: Any = QUESTION, **settings: Any) -> tuple[Any, ...]:
    engine = VisionEngine(processor, turns, miscounts=settings.pop("miscounts", 0))
    async with FakeSGLang(engine) as fake:
        model = SGLangModel(processor.tokenizer, fake.base_url, **{"processor": processor, **settings})
        await ask(model, prompt)
    return model, engine, fake


async def test_images_trajectory_equals_the_processors_rendering(family: Any) -> None:
    model, engine, fake = await played(family, [CALL, ANSWER])
    trajectory = model.trajectory
    last = trajectory.turns[-1]
    assert trajectory.token_ids[: last.start] == engine.read[1]
    assert (trajectory.token_ids[: trajectory.prompt_length], fake.violations) == (engine.read[0], [])
    assert [len(images) for images in engine.images] == [1, 3]
    # one token for each image on the wire
    image_id = family.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert [request.input_ids.count(image_id) for request in fake.requests] == [1, 3]


@pytest.mark.parametrize("text", ["<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>"])
async def test_images_text_that_spells_an_image_is_refused(processor: Any, text: str) -> None:
    image_id = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    async with FakeSGLang([]) as fake:
        model = SGLangModel(processor.tokenizer, fake.base_url, processor=processor)
        assert image_id not in model.template.prompt_ids([{"role": "user", "content": text}])
        with pytest.raises(errors.TrajectoryError, match="got the text .*image_pad.* 2 times .* with 1 images"):
            await ask(model, [*QUESTION, {"text": text}])
    assert fake.requests == []


async def test_images_token_count_of_the_engine_must_match(processor: Any) -> None:
    with pytest.raises(
        errors.EngineResponseError, match="the engine read .* tokens of a prompt with 1 images; expected"
    ):
        await played(processor, [ANSWER], miscounts=1)


async def test_images_template_without_images_is_refused(processor: Any) -> None:
    kwargs = {"chat_template": TEMPLATE.replace("<|image_pad|>", "")}
    model = SGLangModel(processor.tokenizer, "http://127.0.0.1:1", processor=processor, chat_template_kwargs=kwargs)
    with pytest.raises(errors.TemplateError, match="the chat template writes the image token .* 0 times for 1 images"):
        await model.count_tokens([{"role": "user", "content": QUESTION}])


async def test_images_template_that_numbers_images_is_refused(processor: Any) -> None:
    with pytest.raises(EventLoopException, match="renders an image differently after an earlier image.*add_vision_id"):
        await played(processor, [CALL, ANSWER], chat_template_kwargs={"count_images": True})


async def test_images_for_a_text_model_are_refused(shipped_tokenizer: Any) -> None:
    messages: Any = [{"role": "user", "content": QUESTION}]
    for processor in (None, shipped_tokenizer):
        model = SGLangModel(shipped_tokenizer, "http://127.0.0.1:1", processor=processor)
        with pytest.raises(errors.ConfigError, match="got an image, but this model reads text only"):
            await model.count_tokens(messages)


@tool
def draw_unreadable(code: str) -> dict[str, Any]:
    """Return an image that can't be read."""
    broken = {"image": {"format": "png", "source": {"bytes": code.encode()}}}
    return {"status": "success", "content": [{"text": "It is"}, broken]}


async def test_images_unreadable_tool_image_becomes_text(shipped_tokenizer: Any, processor: Any) -> None:
    for tokenizer, its_processor in ((shipped_tokenizer, None), (processor.tokenizer, processor)):
        turns = [Reply.tokens(ids_of(tokenizer, turn)) for turn in (call_text(name="draw_unreadable"), ANSWER)]
        async with FakeSGLang(turns) as fake:
            model = SGLangModel(tokenizer, fake.base_url, processor=its_processor)
            await Agent(model=model, tools=[draw_unreadable], callback_handler=None).invoke_async("Draw.")
        assert "It is\n[an image that can't be read]" in tokenizer.decode(model.trajectory.token_ids)
        assert model.trajectory.images == []


# ---- slime's samples ----


async def generated(processor, folder: Path, sample: Sample, turns: list[str], *, max_new_tokens: int = 2048):
    engine = VisionEngine(processor, turns)
    settings = {"tools": [f"{__name__}.draw"]}
    async with FakeSGLang(engine, context_length=8192) as fake:
        args = args_for(fake.base_url, processor.tokenizer, strands_rollout=settings)
        args.hf_checkpoint = str(folder)
        sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": max_new_tokens})
    return sample, engine, fake


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llava")
    return save_llava(folder), folder


def chat(*sources: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": source} for source in sources]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


async def test_images_sample_has_the_trainers_pixel_values(llava: tuple[Any, Path]) -> None:
    sample, engine, fake = await generated(*llava, Sample(prompt=chat(picture(seed=1)), index=0), [CALL, ANSWER])
    assert sample.status is Sample.Status.COMPLETED
    prompt = len(sample.tokens) - sample.response_length
    assert (sample.tokens[:prompt], sample.tokens[: len(engine.read[1])]) == (engine.read[0], engine.read[1])
    assert (fake.violations, sample.multimodal_train_inputs.keys()) == ([], {"pixel_values"})
    np.testing.assert_array_equal(
        np.asarray(sample.multimodal_train_inputs["pixel_values"]), engine.inputs[1]["pixel_values"]
    )
    assert sample.multimodal_inputs is None


async def test_tito_violations_of_an_episode_with_images(llava: tuple[Any, Path]) -> None:
    processor, folder = llava
    engine = VisionEngine(processor, [CALL, ANSWER])
    async with FakeSGLang(engine, context_length=8192) as fake, record_wire(fake.base_url) as recorder:
        args = args_for(recorder.url, processor.tokenizer, strands_rollout={"tools": [f"{__name__}.draw"]})
        args.hf_checkpoint = str(folder)
        sample = Sample(prompt=chat(picture()), index=0, session_id="one")
        await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2048})
    assert tito_violations(recorder.episodes["one"], sample) == []
    position = sample.loss_mask.index(1)
    sample.rollout_log_probs[position] -= 0.1
    assert "the trained tokens are not what the engine sampled" in tito_violations(recorder.episodes["one"], sample)[0]


async def test_images_over_the_budget_truncate_the_episode(llava: tuple[Any, Path]) -> None:
    processor, folder = llava
    untruncated, _, _ = await generated(processor, folder, Sample(prompt=chat(picture()), index=0), [CALL, ANSWER])
    context_end = len(untruncated.loss_mask) - untruncated.loss_mask[::-1].index(0)
    sample = Sample(prompt=chat(picture()), index=0)
    sample, _, fake = await generated(processor, folder, sample, [CALL], max_new_tokens=context_end)
    assert (sample.status, len(fake.requests)) == (Sample.Status.TRUNCATED, 1)
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 1  # the tool's images have no tokens here


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_images_sampled_image_token_ends_the_episode(llava, is_sampled) -> None:
    image = llava[0].image_token
    escaped = CALL.replace("a dot", f"\\u{ord(image[0]):04x}{image[1:]}")  # the tool returns its argument
    turns = [CALL, image + ANSWER] if is_sampled else [escaped, ANSWER]
    sample, _, _ = await generated(*llava, Sample(prompt=chat(picture()), index=0), turns)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status, facts["stop_reason"]) == (Sample.Status.TRUNCATED, "unsendable_text")
    assert (facts["turns"], sample.loss_mask) == (1, [1] * sample.response_length)


VIDEO = "<|video_pad|>"


@pytest.fixture(scope="module")
def llava_with_videos(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A processor that also has a video token, as Qwen's processors do, and its folder."""
    folder = tmp_path_factory.mktemp("llava_with_videos")
    processor = save_llava(folder)
    processor.video_token = VIDEO
    return processor, folder


@pytest.fixture
def _load_processor_with_videos(llava_with_videos: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, folder = llava_with_videos
    monkeypatch.setattr(images, "load_processor", {str(folder): processor}.__getitem__)


@pytest.mark.usefixtures("_load_processor_with_videos")
@pytest.mark.parametrize("written_by", ["policy", "policy, first", "tool"])
async def test_images_sampled_video_token_ends_the_episode(llava_with_videos, written_by) -> None:
    """A media token without data makes SGLang crash and, after a vision start token, slime's trainer fail."""
    escaped = CALL.replace("a dot", f"\\u{ord(VIDEO[0]):04x}{VIDEO[1:]}")
    turns = {"policy": [CALL, VIDEO + ANSWER], "policy, first": [VIDEO + CALL], "tool": [escaped, ANSWER]}[written_by]
    sample, engine, _ = await generated(*llava_with_videos, Sample(prompt=chat(picture()), index=0), turns)
    facts = sample.metadata["strands_rollout"]
    assert (sample.status, facts["stop_reason"]) == (Sample.Status.TRUNCATED, "unsendable_text")
    is_first = written_by == "policy, first"
    assert (facts["turns"], sum(sample.loss_mask) > 0, sample.remove_sample) == (not is_first, not is_first, is_first)
    assert processor_ids(llava_with_videos[0], VIDEO) not in sample.tokens
    # without a turn, the sample has neither image tokens nor images
    has_image_tokens = processor_ids(llava_with_videos[0], llava_with_videos[0].image_token) in sample.tokens
    assert has_image_tokens == (sample.multimodal_train_inputs is not None) == (not is_first)
    assert len(engine.read) == (2 if written_by == "policy" else 1)


async def test_images_sampled_image_token_in_the_first_turn(llava: tuple[Any, Path]) -> None:
    sample, _, _ = await generated(*llava, Sample(prompt=chat(picture()), index=0), [llava[0].image_token + CALL])
    facts = sample.metadata["strands_rollout"]
    assert (sample.status, facts["stop_reason"]) == (Sample.Status.TRUNCATED, "unsendable_text")


def processor_ids(processor: Any, token: str) -> int:
    return int(processor.tokenizer.convert_tokens_to_ids(token))


@pytest.mark.parametrize("name", FAMILIES)
def test_image_tokens_of_finds_tokens_of_other_media(tokenizer: Any, name: str) -> None:
    found = images.image_tokens_of(vision_processor(name, tokenizer)).other_ids
    assert found == {tokenizer.convert_tokens_to_ids(VIDEO)}


async def test_images_rewritten_history_keeps_its_images(processor: Any) -> None:
    engine = VisionEngine(processor, [ANSWER, ANSWER])
    other = [{"text": "Later."}, image_block(picture(seed=5)), image_block(picture(seed=6))]
    async with FakeSGLang(engine) as fake:
        model = SGLangModel(processor.tokenizer, fake.base_url, processor=processor, on_rewritten_history="segment")
        for prompt in (QUESTION, other):
            await model.answer([{"role": "user", "content": prompt}])  # type: ignore[list-item]
    first, last = model.conversation.branches[0].trajectory, model.trajectory
    assert [len(trajectory.images) for trajectory in (first, last)] == [1, 2]
    assert [len(trajectory.snapshot().images) for trajectory in (first, last)] == [1, 2]
    assert last.token_ids[: last.prompt_length] == engine.read[1]


def test_snapshot_omits_images_of_an_unfinished_turn() -> None:
    """A copy may be taken between the steps of an append: images, tokens, then the turn."""
    image = images.PlacedImage(1, 3, 9, "data:", {})
    trajectory = Trajectory()
    facts = {"finish_reason": "stop", "rid": "r", "latency_s": 0.0}
    trajectory.append_turn([1, 9, 9, 2], [5], [-0.5], images=[image], **facts)
    trajectory.images.append(replace(image, start=6, end=8))
    trajectory.token_ids += [2, 9, 9]
    copied = trajectory.snapshot()
    assert (copied.images, copied.token_ids) == ([image], [1, 9, 9, 2, 5])


async def test_to_agent_loop_outputs_refuses_images(llava: tuple[Any, Path]) -> None:
    sample, _, _ = await generated(*llava, Sample(prompt=chat(picture()), index=0), [ANSWER])
    sample.reward = 1.0
    with pytest.raises(errors.ExportError, match="sample 0 .index=0. has images; expected text only"):
        to_agent_loop_outputs([sample])
    assert finished_episodes([sample], allow_images=True)[0].sample is sample


async def test_images_loaded_by_slime_are_used(llava: tuple[Any, Path]) -> None:
    loaded = {"images": [picture(seed=4)], "videos": None}
    sample = Sample(prompt=chat({"path": "elsewhere.png", "max_pixels": 7}), multimodal_inputs=loaded, index=0)
    sample, engine, _ = await generated(*llava, sample, [ANSWER])
    assert sample.status is Sample.Status.COMPLETED
    assert engine.images[0][0].tobytes() == loaded["images"][0].tobytes()
    assert sample.multimodal_inputs is loaded


async def test_images_aborted_sample_starts_over_with_warning(llava, caplog) -> None:
    aborting = [False]

    def stop() -> bool:
        return aborting[0]

    processor, folder = llava
    engine = VisionEngine(processor, ["The answer", ANSWER])

    def script(body: dict[str, Any], number: int) -> Any:
        reply = engine(body, number)
        if number == 0:
            aborting[0] = True
            reply.finish.update({"type": "abort", "message": "Aborted", "status_code": None})
        return reply

    sample = Sample(prompt=chat(picture()), index=0)
    async with FakeSGLang(script, context_length=8192) as fake:
        args = args_for(fake.base_url, processor.tokenizer, strands_rollout={"tools": [], "should_abort": stop})
        args.hf_checkpoint = str(folder)
        sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 512})
        assert sample.status is Sample.Status.ABORTED
        assert "can't be saved and will start from scratch" in caplog.text
        aborting[0] = False
        sample = await generate(args, sample, {"temperature": 1.0, "max_new_tokens": 512})
    assert sample.status is Sample.Status.COMPLETED
    assert fake.requests[1].input_ids == fake.requests[0].input_ids
    assert len(sample.multimodal_train_inputs["pixel_values"]) == 1


def sources(tmp_path: Path) -> list[Any]:
    data = encoded(picture())
    path = tmp_path / "a.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    return [
        picture(),
        str(path),
        f"file://{path}",
        text,
        f"data:image/png;base64,{text}",
        data,
        {"bytes": data, "path": None},
    ]


def test_image_block_reads_each_of_slimes_forms(tmp_path: Path) -> None:
    blocks = [make_image_block(source) for source in sources(tmp_path)]
    assert all(block == image_block(picture()) for block in blocks)
    prompt = to_episode_prompt(chat(*sources(tmp_path)), None, None)
    assert prompt.messages[0]["content"] == [*blocks, {"text": "What is it?"}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("https://example.com/a.png", "a rollout fetches nothing from a network"),
        ("no/such/file.png", "neither a file's path nor a data URL nor base64"),
        (b"text", "an image of 4 bytes that can't be read"),
        (7, "got an image of type int"),
        (None, "got an image with .*expected `type` and `image`"),
    ],
)
def test_to_episode_prompt_image_error_names_the_expected_form(source: Any, message: str) -> None:
    with pytest.raises(errors.PromptError, match=message):
        to_episode_prompt(chat(source), None, None)


@pytest.mark.parametrize(
    ("prompt", "loaded", "message"),
    [
        ("What?", {"images": ["x"]}, "got a string as prompt, and 1 images"),
        (chat("x"), {"images": ["x"], "videos": ["v"]}, "got \\['videos'\\] in the sample's multimodal_inputs"),
        (chat("x"), {"images": [picture(), picture()]}, "got 2 loaded images, 1 more than there are image parts"),
        (chat("x", "y"), {"images": [picture()]}, "got more image parts than loaded images"),
        (
            [{"role": "user", "content": [{"type": "image", "image": picture()}, {"type": "text"}]}],
            None,
            "got the part {'type': 'text'} at position 0 of the chat; expected text or an image",
        ),
    ],
)
def test_to_episode_prompt_refuses_images_without_a_place(prompt: Any, loaded: Any, message: str) -> None:
    with pytest.raises(errors.PromptError, match=message):
        to_episode_prompt(prompt, None, None, loaded)
