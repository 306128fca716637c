"""A vision-language model on the real SGLang: it reads the trajectory's tokens and the trainer's pixels."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from real_server import SCRIPTS, start_sglang, version_of
from run_report import note_engine
from vision import encoded, image_block, picture, vision_processor, vision_tokenizer

from strands_rollout import SGLangModel
from strands_rollout.client.client import SGLangClient
from strands_rollout.model.images import image_tokens_of, train_inputs_of

pytestmark = pytest.mark.real
SCRIPT = Path(__file__).with_name("vision_model.py")


def in_sglangs_environment(*arguments: str) -> str:
    venv = os.environ.get("STRANDS_ROLLOUT_SGLANG_VENV", str(SCRIPTS.parent / ".venv-sglang"))
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS / "real_engines" / "shim"), "OMP_NUM_THREADS": "1"}
    command = [f"{venv}/bin/python", str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    vision_tokenizer().save_pretrained(folder)
    in_sglangs_environment("make", str(folder))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    started = start_sglang(folder)
    yield started.base_url
    started.stop()


@pytest.fixture
def url(server: str, request: pytest.FixtureRequest) -> str:
    note_engine(request.node, f"SGLang {version_of(server)}")
    return server


@pytest.fixture(scope="module")
def processor() -> Any:
    return vision_processor("Qwen2_5_VLProcessor", vision_tokenizer())


async def test_sglang_reads_trajectory_with_trainers_pixels(url, folder, processor, tmp_path, report_row) -> None:
    # sample greedily: otherwise this model sometimes samples <|video_pad|>, which SGLang refuses in a prompt
    params = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}
    model = SGLangModel(processor.tokenizer, url, processor=processor, sampling_params=params)
    history: list[Any] = []
    for seed, size in enumerate([(84, 56), (112, 84), (56, 140)]):  # multiples of 28, which are not resized
        content = [{"text": "Look: "}, image_block(picture(*size, seed=seed)), {"text": "What?"}]
        history.append({"role": "user", "content": content + [image_block(picture(84, 56, seed=9))] * (seed == 1)})
        history.append((await model.answer(history)).message)
    trajectory = model.trajectory
    ends = [(part.prompt_tokens, part.start) for part in trajectory.parts]
    assert [read for read, _ in ends] == [start for _, start in ends]
    assert len(trajectory.images) == 4

    def apart(**changes: Any) -> float:
        """Return the largest difference between the engine's logprobs and those computed from the trainer's data."""
        inputs = {name: np.asarray(value) for name, value in (train_inputs_of(trajectory.images) or {}).items()}
        np.savez(tmp_path / "given.npz", ids=np.array(trajectory.token_ids), **(inputs | changes))
        own = json.loads(in_sglangs_environment("logprobs", str(folder), str(tmp_path / "given.npz")))
        sampled = [position for position, mask in enumerate(trajectory.loss_mask) if mask]
        return max(abs(own[position - 1] - trajectory.logprobs[position]) for position in sampled)

    black = np.zeros_like(np.asarray((train_inputs_of(trajectory.images) or {})["pixel_values"]))
    distance, without_images = apart(), apart(pixel_values=black)
    assert distance < 1e-4
    assert without_images > 1e-2
    report_row(
        "images: logprobs of SGLang and transformers", images=4, tokens=len(trajectory.token_ids), distance=distance
    )


async def test_sglang_keeps_ids_that_no_encoding_gives(url: str, processor: Any) -> None:
    tokenizer = processor.tokenizer
    ids = tokenizer.encode("<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>", add_special_tokens=False)
    letters = [token for letter in "What is the sum" for token in tokenizer.encode(letter, add_special_tokens=False)]
    assert letters != tokenizer.encode("What is the sum", add_special_tokens=False)
    image = image_tokens_of(processor).read(encoded(picture(84, 56)))
    async with SGLangClient(url) as client:
        answer = await client.generate([*ids, *letters], {"max_new_tokens": 2}, extra={"image_data": [image.data_url]})
    assert answer.prompt_tokens == len(ids) + len(letters) + image.token_count - 1
