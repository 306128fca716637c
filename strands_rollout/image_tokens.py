"""Images -> their tokens and training inputs, as the model's own Hugging Face processor makes them.

Knows processors of transformers; nothing of templates, messages or engines.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from strands_rollout.errors import ConfigError
from strands_rollout.images import read_rgb, to_data_url, to_png

# what a processor makes of text: the trajectory has its ids
_OF_TEXT: Final = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
_KNOWN: Final[weakref.WeakKeyDictionary[Any, ImageTokens]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class ReadImage:
    """An image as the model reads it.

    Attributes:
        token_count: Image tokens that stand for it, at least 1.
        data_url: The image as PNG.
        train_inputs: See `PlacedImage`.
    """

    token_count: int
    data_url: str
    train_inputs: Mapping[str, np.ndarray[Any, Any]]


class ImageTokens:
    """What a processor makes of images. Several threads may use it: processors are used by one at a time.

    Attributes:
        token_id: The image token, of which a template writes one for each image.
    """

    def __init__(self, processor: Any) -> None:  # noqa: ANN401 - any Hugging Face processor
        self._token = getattr(processor, "image_token", None)
        if getattr(processor, "image_processor", None) is None or not isinstance(self._token, str):
            raise ConfigError(
                f"got an image, and this model reads text only: its processor is a {type(processor).__name__}; "
                "expected a vision-language model's, with an image_processor and an image_token"
            )
        self.token_id: int = processor.tokenizer.convert_tokens_to_ids(self._token)
        self._processor = processor
        self._lock = threading.Lock()

    def read(self, data: bytes) -> ReadImage:
        """Read a file's bytes; blocks while the processor works.

        Raises:
            PromptError: They are no image.
            ConfigError: The processor does not take it, or makes something else of it than image tokens alone.
        """
        from transformers.utils import is_torch_available

        image = read_rgb(data)
        # torchvision's backends make tensors only
        tensors = "pt" if is_torch_available() else "np"
        try:
            with self._lock:
                made = self._processor(text=[self._token], images=[image], images_kwargs={"return_tensors": tensors})
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as e:
            raise ConfigError(f"the {type(self._processor).__name__} fails on an image of {image.size}: {e}") from e
        ids = np.asarray(made["input_ids"]).reshape(-1).tolist()
        if not ids or set(ids) != {self.token_id}:
            raise ConfigError(
                f"the {type(self._processor).__name__} makes the ids {ids[:20]} of {self._token}; expected nothing but "
                f"{self.token_id}, which SGLang repeats for each image"
            )
        inputs = {name: np.asarray(value) for name, value in made.items() if name not in _OF_TEXT}
        return ReadImage(len(ids), to_data_url(to_png(image)), inputs)


def image_tokens_of(processor: Any) -> ImageTokens:  # noqa: ANN401
    """Of a processor, or of the folder or hub id of one, loaded once per process; blocks while it is loaded.

    Raises:
        ConfigError: There is none, or it is none for images.
    """
    if processor is None:
        raise ConfigError(
            "got an image, and this model reads text only; expected SGLangModel(processor=...), a vision-language "
            "model's processor, or the folder or hub id of one"
        )
    found = load_processor(processor) if isinstance(processor, str) else processor
    # of threads that come at once all get the same, and so the same lock
    return _KNOWN.get(found) or _KNOWN.setdefault(found, ImageTokens(found))


@functools.lru_cache(maxsize=8)
def load_processor(checkpoint: str) -> Any:  # noqa: ANN401 - any Hugging Face processor
    """The processor of a folder or hub id, loaded once per process.

    Raises:
        ConfigError: It can't be loaded.
    """
    from transformers import AutoProcessor

    try:
        return AutoProcessor.from_pretrained(checkpoint)
    except (OSError, ValueError, ImportError) as e:
        raise ConfigError(
            f"got an image, and this model reads text only, or its processor can't be loaded from {checkpoint!r}: {e}"
        ) from e
