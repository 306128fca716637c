"""The images among new messages -> their tokens, in the places that the template gives them.

Knows a template's processor and messages with images; nothing of trajectories or requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strands_rollout.chat_messages import ChatMessage, take_images
from strands_rollout.errors import TemplateError
from strands_rollout.first_use import once
from strands_rollout.image_tokens import ReadImage, image_tokens_of
from strands_rollout.images import PlacedImage

if TYPE_CHECKING:
    from strands_rollout.chat_template import ChatTemplate


async def read_images(template: ChatTemplate, chat: Sequence[ChatMessage]) -> list[ReadImage]:
    """Take the images out of new messages and read them, in a thread; none is the rule.

    Raises:
        PromptError: One can't be read.
        ConfigError: There is no processor that reads them.
    """
    data = take_images(chat)
    if not data:
        return []
    processor = template.processor
    if isinstance(processor, str):
        await once(("processor", processor), lambda: image_tokens_of(processor))
    return await asyncio.to_thread(lambda: [image_tokens_of(processor).read(one) for one in data])


def further_tokens(images: Sequence[ReadImage]) -> int:
    """Tokens of images beyond the one that a template writes for each."""
    return sum(image.token_count - 1 for image in images)


def place_images(
    template: ChatTemplate, ids: Sequence[int], images: Sequence[ReadImage], start: int
) -> tuple[list[int], list[PlacedImage]]:
    """New context with all tokens of its images, and their places.

    Args:
        template: That made the ids.
        ids: One token for each image among them.
        images: In order, at least one.
        start: Tokens before them.

    Raises:
        TemplateError: The template does not show each image once.
    """
    token_id = image_tokens_of(template.processor).token_id
    if ids.count(token_id) != len(images):
        raise TemplateError(
            f"the chat template shows {ids.count(token_id)} of {len(images)} images, by the token "
            f"{template.encoder.decode([token_id])!r}; expected each, once: it may be for text only, or show no images "
            "in tools' results"
        )
    found: list[int] = []
    placed: list[PlacedImage] = []
    unplaced = iter(images)
    for one in ids:
        if one == token_id:
            image, at = next(unplaced), start + len(found)
            found += [token_id] * image.token_count
            placed.append(PlacedImage(at, start + len(found), token_id, image.data_url, image.train_inputs))
        else:
            found.append(one)
    return found, placed
