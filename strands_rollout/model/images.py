"""Images of prompts and tools: their tokens, their training inputs, and their fields in a request.

Tokens and training inputs come from the model's own Hugging Face processor. Requests have `image_data` and `input_ids`
in the form that SGLang 0.5.23 reads (python/sglang/srt/multimodal/processors/base_processor.py).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import functools
import io
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from strands_rollout.aio import run_once
from strands_rollout.client.generate_api import Generation
from strands_rollout.errors import ConfigError, EngineResponseError, PromptError, TemplateError, UnsendableTextError
from strands_rollout.template.messages import ChatMessage, take_images

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import ProcessorMixin

    from strands_rollout.template.chat_template import ChatTemplate

logger = logging.getLogger(__name__)
_MAX_PATH_CHARS: Final = 4096


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """An image among the context tokens of a trajectory.

    Attributes:
        start: Index in `Trajectory.token_ids` of the image's first token.
        end: Index after the image's last token; all of the image's tokens are `token_id`.
        token_id: Id of the model's image token.
        data_url: The image as a PNG data URL, for SGLang's `image_data`.
        train_inputs: Outputs of the model's processor for the image, by name: arrays that can be joined with other
            images' arrays along the first axis.
        other_ids: Ids of the model's tokens for other media, such as videos; a request with images must not have any.
    """

    start: int
    end: int
    token_id: int
    data_url: str
    train_inputs: Mapping[str, np.ndarray[Any, Any]]
    other_ids: frozenset[int] = frozenset()


def train_inputs_of(images: Sequence[PlacedImage]) -> dict[str, Any] | None:
    """Return the processor's outputs for all images, joined by name; None if there are no images.

    The outputs are joined along the first axis, as in slime's examples/geo3k_vlm_multi_turn. The result has
    PyTorch tensors if torch is installed, else NumPy arrays. slime turns arrays into tensors
    (slime/observability/rollout_data_utils.py).

    Raises:
        ConfigError: The outputs can't be joined.
    """
    if not images:
        return None
    from transformers import BatchFeature
    from transformers.utils import is_torch_available

    try:
        joined = {
            name: np.concatenate([image.train_inputs[name] for image in images]) for name in images[0].train_inputs
        }
    except (KeyError, ValueError) as e:
        raise ConfigError(
            f"the processor's outputs of {len(images)} images can't be joined along their first axis: {e}; expected "
            "the same outputs for each image, with other axes of equal lengths, as from Qwen2-VL's processor"
        ) from e
    return dict(BatchFeature(joined, tensor_type="pt" if is_torch_available() else None))


def read_rgb(data: bytes) -> Image:
    """Decode the bytes of an image file to an RGB image.

    Raises:
        PromptError: The bytes can't be read as an image.
        ConfigError: Pillow is not installed.
    """
    pillow = _import_pillow()
    try:
        with pillow.open(io.BytesIO(data)) as image:
            read: Image = image.convert("RGB")
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as e:
        raise PromptError(f"got an image of {len(data)} bytes that can't be read: {e}") from e
    return read


def to_png(image: Image) -> bytes:
    """Return an image as RGB PNG. PNG is lossless, so the engine and the trainer see the same pixels."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, format="PNG")
    return buffer.getvalue()


def to_data_url(png: bytes) -> str:
    """Return a PNG as a data URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def image_block(source: object) -> dict[str, Any]:
    """Return Strands' content block of an image.

    Args:
        source: An image in one of the forms in slime's data sets: a PIL image, a file's path, a data URL, base64, a
            file's bytes, or `{"bytes": ..., "path": ...}`, as `datasets` stores images in Parquet. The path is used
            only if there are no bytes.

    Raises:
        PromptError: The source has none of these forms, or can't be read as an image.
        ConfigError: Pillow is not installed.
    """
    pillow = _import_pillow()
    image = source if isinstance(source, pillow.Image) else read_rgb(_bytes_of(source))
    return {"image": {"format": "png", "source": {"bytes": to_png(image)}}}


def _bytes_of(source: object) -> bytes:
    if isinstance(source, Mapping) and (source.get("bytes") or source.get("path")):
        source = source.get("bytes") or source["path"]
    if isinstance(source, bytes):
        return source
    if isinstance(source, str | Path):
        return _bytes_of_text(str(source))
    raise PromptError(
        f"got an image of type {type(source).__name__}; expected a PIL image, a path, a data URL, base64, bytes, or a "
        "mapping with bytes or path"
    )


def _bytes_of_text(text: str) -> bytes:
    if text.startswith(("http://", "https://")):
        raise PromptError(
            f"got the image {text[:100]!r}; expected a local image, since a rollout fetches nothing from a "
            "network. Save it to a file, and give its path"
        )
    path = Path(text.removeprefix("file://"))
    try:
        if len(text) < _MAX_PATH_CHARS and path.is_file():
            return path.read_bytes()
        return base64.b64decode(text.partition(",")[2] if text.startswith("data:") else text, validate=True)
    except (OSError, ValueError, binascii.Error) as e:
        raise PromptError(
            f"got the image {text[:100]!r}, which is neither a file's path nor a data URL nor base64: {e}"
        ) from e


def _import_pillow() -> ModuleType:
    try:
        from PIL import Image
    except ImportError as e:
        raise ConfigError(
            "images need Pillow, which is not installed; run: pip install 'strands-rollout[images]'"
        ) from e
    return Image


# outputs of a processor for the text, which are not needed: the trajectory has the text's tokens
_TEXT_OUTPUTS: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_IMAGE_TOKENS: Final[weakref.WeakKeyDictionary[Any, ImageTokens]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as the model reads it.

    Attributes:
        token_count: Number of image tokens that stand for the image, at least 1.
        data_url: The image as a PNG data URL.
        train_inputs: See `PlacedImage`.
    """

    token_count: int
    data_url: str
    train_inputs: Mapping[str, np.ndarray[Any, Any]]


class ImageTokens:
    """Converter of images to tokens and training inputs, with a model's processor.

    Threads may share it: a lock lets only one thread at a time use the processor.

    Attributes:
        token_id: Id of the image token, which a template writes once for each image.
        other_ids: Ids of the processor's tokens for other media.

    Raises:
        ConfigError: The processor does not read images.
    """

    def __init__(self, processor: ProcessorMixin) -> None:
        self._token = getattr(processor, "image_token", None)
        if getattr(processor, "image_processor", None) is None or not isinstance(self._token, str):
            raise ConfigError(
                f"got an image, but this model reads text only: its processor is a {type(processor).__name__}; "
                "expected the processor of a vision-language model, with an image_processor and an image_token"
            )
        self.token_id: int = processor.tokenizer.convert_tokens_to_ids(self._token)
        media = (getattr(processor, name, None) for name in ("video_token", "audio_token"))
        ids = {processor.tokenizer.convert_tokens_to_ids(token) for token in media if isinstance(token, str)}
        # a tokenizer returns unk_token_id for a token that it lacks, for example for videos
        self.other_ids = frozenset(ids - {self.token_id, None, processor.tokenizer.unk_token_id})
        self._processor = processor
        self._lock = threading.Lock()

    def read(self, data: bytes) -> ReadImage:
        """Read an image from a file's bytes; block while the processor works.

        Raises:
            PromptError: The bytes can't be read as an image.
            ConfigError: Pillow is not installed, the processor refuses the image, or it returns tokens other than the
                image token.
        """
        from transformers.utils import is_torch_available

        image = read_rgb(data)
        # torchvision's backends return tensors only
        tensors = "pt" if is_torch_available() else "np"
        try:
            with self._lock:
                outputs = self._processor(text=[self._token], images=[image], images_kwargs={"return_tensors": tensors})
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise ConfigError(
                f"the {type(self._processor).__name__} fails on an image of {image.size} pixels: {e}"
            ) from e
        ids = np.asarray(outputs["input_ids"]).reshape(-1).tolist()
        if not ids or set(ids) != {self.token_id}:
            raise ConfigError(
                f"the {type(self._processor).__name__} converts {self._token!r} to the ids {ids[:20]}; expected only "
                f"the id {self.token_id}, which SGLang repeats to fill the image's place"
            )
        inputs = {name: np.asarray(value) for name, value in outputs.items() if name not in _TEXT_OUTPUTS}
        return ReadImage(len(ids), to_data_url(to_png(image)), inputs)


def image_tokens_of(processor: ProcessorMixin) -> ImageTokens:
    """Return the `ImageTokens` of a processor. A folder or hub id is loaded once per process; loading it blocks.

    Raises:
        ConfigError: There is no processor, or it can't be loaded or does not read images.
    """
    if processor is None:
        raise ConfigError(
            "got an image, but this model reads text only; expected SGLangModel(processor=...) with the processor of a "
            "vision-language model, or its folder or hub id"
        )
    loaded = load_processor(processor) if isinstance(processor, str) else processor
    # concurrent threads get the same object, and so the same lock
    return _IMAGE_TOKENS.get(loaded) or _IMAGE_TOKENS.setdefault(loaded, ImageTokens(loaded))


@functools.lru_cache(maxsize=8)
def load_processor(checkpoint: str) -> ProcessorMixin:
    """Return the processor of a folder or hub id, loaded once per process.

    Raises:
        ConfigError: The processor can't be loaded.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(checkpoint)
    except (OSError, ValueError, ImportError) as e:
        raise ConfigError(
            f"got an image, but this model reads text only, or its processor can't be loaded from {checkpoint!r}: {e}"
        ) from e


Decode = Callable[[Sequence[int]], str]


def image_fields(images: Sequence[PlacedImage]) -> dict[str, Any]:
    """Return the images as a field of a request; {} if there are none."""
    return {"image_data": [image.data_url for image in images]} if images else {}


def collapsed_ids(ids: Sequence[int], images: Sequence[PlacedImage], decode: Decode) -> list[int]:
    """Replace all tokens of each image by a single token, which SGLang expands again (in `_expand_input_ids`).

    The engine searches the decoded text for image tokens, and never answers if it finds more image tokens than
    images. It fails if it finds a token of another medium.

    Args:
        ids: Ids of the whole request, with all tokens of each image.
        images: The images in the order of their positions, at least one.
        decode: Returns the text of ids.

    Raises:
        UnsendableTextError: The text of the ids has a media token that stands for no image. A prompt, a tool or the
            policy wrote the token.
    """
    found: list[int] = []
    position = 0
    for image in images:
        found += ids[position : image.start + 1]
        position = image.end
    found += ids[position:]
    token, text = decode([images[0].token_id]), decode(found)
    for other in map(decode, ([one] for one in sorted(images[0].other_ids))):
        if other and other in text:
            raise UnsendableTextError(
                f"got the text {other!r} in a conversation with images; expected no text of a video or sound token: "
                "SGLang would look for a video or sound that was not sent, and fail. The text came from a prompt, a "
                "tool or the policy"
            )
    count = text.count(token)
    if count != len(images):
        raise UnsendableTextError(
            f"got the text {token!r} {count} times in a conversation with {len(images)} images; expected it once for "
            "each image: SGLang would wait forever for an additional image. The additional text came from a prompt, a "
            "tool or the policy"
        )
    return found


def check_image_answer(generation: Generation, images: Sequence[PlacedImage], length: int) -> None:
    """Check that the engine and the trainer read the same number of tokens, and that no media token was sampled.

    An answer without tokens is not checked. The number of tokens read is checked only if the engine reports it.

    Args:
        generation: The engine's answer.
        images: The request's images, at least one.
        length: Number of tokens of the request, with all tokens of each image.

    Raises:
        EngineResponseError: The engine read another number of tokens than `length`.
        UnsendableTextError: The policy sampled the token of an image or another medium. slime's trainer fails on
            this token, since no image belongs to it.
    """
    if not generation.output_ids:
        return
    read = generation.meta_info.get("prompt_tokens")
    if read not in (None, length):
        raise EngineResponseError(
            f"the engine read {read!r} tokens of a prompt with {len(images)} images; expected "
            f"{length}, as the model's own processor counts them. Serve the same preprocessor_config.json, with an "
            "SGLang that keeps a request's ids (0.5.23 does, unless SGLANG_MM_AVOID_RETOKENIZE is off)"
        )
    media = {images[0].token_id, *images[0].other_ids}
    if sampled := media.intersection(generation.output_ids):
        raise UnsendableTextError(
            f"the policy sampled the token {min(sampled)}, which stands for an image, a video or a sound; slime's "
            "trainer would look for the medium and fail",
            is_sampled=True,
        )


async def read_images(template: ChatTemplate, chat: Sequence[ChatMessage]) -> list[ReadImage]:
    """Remove the images' bytes from new messages, read the images in a thread, and return them.

    If a tool's image can't be read, a text replaces the image. Otherwise, the policy could end its episode by a call
    that returns such an image. If the message has no other image, its content becomes a string.

    Raises:
        PromptError: A user's image can't be read.
        ConfigError: Pillow or the processor is missing for a user's image, or the image's conversion fails.
    """
    found: list[ReadImage] = []
    for message in chat:
        for part, data in take_images(message):
            try:
                found.append(await _read_image(template.processor, data))
            except (PromptError, ConfigError) as e:
                if message["role"] != "tool":
                    raise
                logger.warning("a tool's image can't be read tool=%s: %s", message.get("name"), e)
                part.clear()
                part |= {"type": "text", "text": "[an image that can't be read]"}
        if isinstance(message["content"], list) and all(part["type"] == "text" for part in message["content"]):
            message["content"] = "\n".join(part["text"] for part in message["content"])
    return found


async def _read_image(processor: ProcessorMixin, data: bytes) -> ReadImage:
    if isinstance(processor, str):
        await run_once(("processor", processor), lambda: image_tokens_of(processor))
    return await asyncio.to_thread(lambda: image_tokens_of(processor).read(data))


def extra_image_tokens(images: Sequence[ReadImage]) -> int:
    """Return how many tokens the images have beyond the single token that a template writes for each."""
    return sum(image.token_count - 1 for image in images)


def place_images(
    template: ChatTemplate, ids: Sequence[int], images: Sequence[ReadImage], start: int
) -> tuple[list[int], list[PlacedImage]]:
    """Replace the single token of each image in new context by all of its tokens; also return the placed images.

    Args:
        template: The template that rendered the ids.
        ids: The new context, with one token for each image.
        images: The images in order, at least one.
        start: Number of tokens before the context.

    Raises:
        TemplateError: The template does not show each image once.
    """
    tokens = image_tokens_of(template.processor)
    token_id = tokens.token_id
    if ids.count(token_id) != len(images):
        raise TemplateError(
            f"the chat template writes the image token {template.encoder.decode([token_id])!r} {ids.count(token_id)} "
            f"times for {len(images)} images; expected it once for each. The template may be for text only, or leave "
            "out images in tool results"
        )
    found: list[int] = []
    placed: list[PlacedImage] = []
    unplaced = iter(images)
    for each in ids:
        if each == token_id:
            image, begin = next(unplaced), start + len(found)
            found += [token_id] * image.token_count
            contents = image.data_url, image.train_inputs, tokens.other_ids
            placed.append(PlacedImage(begin, start + len(found), token_id, *contents))
        else:
            found.append(each)
    return found, placed
