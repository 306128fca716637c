"""What a request about images holds, and what its answer must be.

Knows SGLang's `image_data` beside `input_ids`; nothing of HTTP, templates or processors. Written for SGLang 0.5.23,
python/sglang/srt/multimodal/processors/base_processor.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from strands_rollout.errors import EngineResponseError, TrajectoryError
from strands_rollout.generation import Generation
from strands_rollout.images import PlacedImage

Decode = Callable[[Sequence[int]], str]


def image_fields(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """The request's field of images; none without images."""
    return {"image_data": [image.data_url for image in images]} if images else {}


def collapsed_ids(ids: Sequence[int], images: Sequence[PlacedImage], decode: Decode) -> list[int]:
    """The ids with one token for each image, of which the engine makes as many as the image needs.

    The engine keeps a request's ids but for its image tokens (`_expand_input_ids`), where there is one for each image.
    It looks for them in the decoded text, and never answers where it finds more than images.

    Args:
        ids: Of the whole request, all tokens of each image among them.
        images: In the order of their places.
        decode: Text of ids.

    Raises:
        TrajectoryError: The image token's text stands for no image somewhere: the policy or an untrusted text wrote it.
    """
    found: list[int] = []
    position = 0
    for image in images:
        found += ids[position : image.start + 1]
        position = image.end
    found += ids[position:]
    token = decode([images[0].token_id])
    count = decode(found).count(token)
    if count != len(images):
        raise TrajectoryError(
            f"got {count} times the text {token} in a conversation with {len(images)} images; expected it once for "
            "each: SGLang takes any other for an image that is missing, and never answers. A prompt, a tool or the "
            "policy wrote it."
        )
    return found


def check_image_answer(generation: Generation, images: Sequence[PlacedImage], length: int) -> None:
    """See that the engine read what the trainer will read.

    Args:
        generation: The answer.
        images: Of the request, at least one.
        length: Tokens of the request, all of each image counted.

    Raises:
        EngineResponseError: The engine read another number of tokens.
        TrajectoryError: The policy sampled the image token, for which the trainer would miss an image.
    """
    if not generation.output_ids:
        return
    if generation.prompt_tokens not in (None, length):
        raise EngineResponseError(
            f"the engine read {generation.prompt_tokens} tokens of a prompt with {len(images)} images; expected "
            f"{length}, as the model's own processor counts them. Serve the same preprocessor_config.json, with an "
            "SGLang that keeps a request's ids (0.5.23 does, unless SGLANG_MM_AVOID_RETOKENIZE is off)."
        )
    if images[0].token_id in generation.output_ids:
        raise TrajectoryError(
            f"the policy sampled the image token {images[0].token_id}, which stands for no image; a trainer would look "
            "for one"
        )
