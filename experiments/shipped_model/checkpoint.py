"""Create, save and load a model folder in Hugging Face's layout."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from experiments.shipped_model.tokenizer import CONTEXT_LENGTH


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of a model; the fields are named as in config.json, except `context_length`, which is in tokens."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    context_length: int = CONTEXT_LENGTH


SHIPPED_SHAPE: Final = Shape()


def model_config(tokenizer: PreTrainedTokenizerBase, shape: Shape = SHIPPED_SHAPE) -> dict[str, Any]:
    """Return the content of config.json in the form of Qwen3-8B's, which transformers 4 and 5 and SGLang read."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.context_length,
        "max_window_layers": shape.num_hidden_layers,
        "model_type": "qwen3",
        "num_attention_heads": shape.num_attention_heads,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_key_value_heads": shape.num_key_value_heads,
        "pad_token_id": tokenizer.pad_token_id,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "float16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": len(tokenizer),
    }


def new_model(config: dict[str, Any], seed: int) -> Qwen3ForCausalLM:
    """Create a model with random weights drawn from `seed`, in fp32."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**{**config, "torch_dtype": "float32"}))


def save_model(model: Qwen3ForCausalLM, config: dict[str, Any], folder: Path) -> None:
    """Write config.json, generation_config.json and the weights in fp16; tied weights are written once."""
    end_ids = [config["eos_token_id"], config["pad_token_id"]]
    generation = {"do_sample": True, "eos_token_id": end_ids, "pad_token_id": end_ids[1], "temperature": 1.0}
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(config, folder / "config.json")
    _write_json(generation, folder / "generation_config.json")
    weights = {
        name: weight.detach().to(torch.float16).contiguous()
        for name, weight in model.state_dict().items()
        if name != "lm_head.weight"
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """Load a saved model in fp32."""
    disable_progress_bar()
    model: Qwen3ForCausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


def write_training_facts(facts: dict[str, Any], folder: Path) -> None:
    """Write training.json, which records how the checkpoint was made and its evaluation."""
    _write_json(facts, folder / "training.json")


def _write_json(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
