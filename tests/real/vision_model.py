"""A Qwen2.5-VL of random weights, and its logprobs; run in SGLang's environment, which has torch and torchvision.

python vision_model.py make FOLDER            # FOLDER holds a tokenizer with Qwen's tokens of images
python vision_model.py logprobs FOLDER FILE   # FILE: ids and a processor's outputs (.npz); prints JSON
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessor
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor


def make(folder: str) -> None:
    """Write weights, configuration and processor beside the tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config_of(tokenizer)).save_pretrained(folder)
    images, videos = Qwen2VLImageProcessor(), Qwen2VLVideoProcessor()
    Qwen2_5_VLProcessor(images, tokenizer, videos, chat_template=tokenizer.chat_template).save_pretrained(folder)


def config_of(tokenizer: Any) -> Qwen2_5_VLConfig:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1000000.0}
    text = {
        "vocab_size": 1280,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": rope,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "out_hidden_size": 64,
        "window_size": 112,
        "fullatt_block_indexes": [1],
    }
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>"} | {
        f"vision_{end}": f"<|vision_{end}|>" for end in ("start", "end")
    }
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in tokens.items()}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


def logprobs(folder: str, file: str) -> list[float]:
    """Return the logprob of each id but the first."""
    given = {name: torch.from_numpy(value) for name, value in np.load(file).items()}
    ids = given.pop("ids")[None]
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    of_images = (ids == model.config.image_token_id).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=of_images, **given).logits
    return logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].tolist()


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(sys.argv[2])
    else:
        print(json.dumps(logprobs(*sys.argv[2:4])))
