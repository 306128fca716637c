"""Writes a tiny Qwen3 folder with seeded random weights: config, safetensors, byte-level BPE tokenizer, chat template.

Knows the Hugging Face layout. The model says nothing sensible; what it says is the same in every implementation.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAG_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CORPUS = [
    "You are a careful assistant. Solve the problem step by step with Python and answer in \\boxed{}.",
    "def main():\n    total = sum(range(10))\n    print(total)\n",
    '{"name": "execute_python_code", "arguments": {"code": "print(1 + 2)"}}',
    "A farmer has twelve apples and sells three of them. How many apples are left? Die Straße ist naß. 数学です。",
]
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
    {%- if content is string -%}{{- content -}}{%- else -%}
        {%- for part in content or [] -%}{{- part.text -}}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- text(messages[0].content) + '\\n\\n' }}{% endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\\n' + text(messages[0].content) + '<|im_end|>\\n' }}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\\n' + text(message.content) + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\\n' + text(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {%- set call = call.function %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class TinyQwen3:
    """The shape of a tiny model; `write` makes its folder."""

    layers: int = 2
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 48
    context_length: int = 512
    tied: bool = True
    dtype: str = "float32"
    shards: int = 1
    rope_in_parameters: bool = False
    seed: int = 0

    def write(self, folder: Path) -> Path:
        """Write the folder and return it."""
        tokenizer = build_tokenizer()
        self.write_configs(folder, tokenizer)
        self._write_weights(folder, tokenizer.get_vocab_size())
        return folder

    def write_configs(self, folder: Path, tokenizer: Tokenizer) -> None:
        """Write everything but the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(folder / "tokenizer.json"))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config())
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
        vocab_size = tokenizer.get_vocab_size()
        _write_json(folder / "config.json", self._config(tokenizer, vocab_size))
        eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
        _write_json(folder / "generation_config.json", {"eos_token_id": eos, "do_sample": True})

    def _config(self, tokenizer: Tokenizer, vocab_size: int) -> dict[str, object]:
        config: dict[str, object] = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": vocab_size,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.context_length,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "use_sliding_window": False,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "torch_dtype": self.dtype,
        }
        if self.rope_in_parameters:
            config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
        else:
            config["rope_theta"] = 10000.0
        return config

    def _write_weights(self, folder: Path, vocab_size: int) -> None:
        names = sorted(self._shapes(vocab_size))
        rng = np.random.default_rng(self.seed)
        tensors = {name: _random_tensor(rng, name, self._shapes(vocab_size)[name]) for name in names}
        if self.shards == 1:
            _save(tensors, folder / "model.safetensors", self.dtype)
            return
        weight_map = {}
        for shard in range(self.shards):
            file = f"model-{shard + 1:05d}-of-{self.shards:05d}.safetensors"
            part = {name: tensors[name] for name in names[shard :: self.shards]}
            _save(part, folder / file, self.dtype)
            weight_map.update(dict.fromkeys(part, file))
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

    def _shapes(self, vocab_size: int) -> dict[str, tuple[int, ...]]:
        q_dim, kv_dim = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (vocab_size, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (vocab_size, self.hidden)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            shapes |= {
                prefix + "input_layernorm.weight": (self.hidden,),
                prefix + "post_attention_layernorm.weight": (self.hidden,),
                prefix + "self_attn.q_proj.weight": (q_dim, self.hidden),
                prefix + "self_attn.k_proj.weight": (kv_dim, self.hidden),
                prefix + "self_attn.v_proj.weight": (kv_dim, self.hidden),
                prefix + "self_attn.o_proj.weight": (self.hidden, q_dim),
                prefix + "self_attn.q_norm.weight": (self.head_dim,),
                prefix + "self_attn.k_norm.weight": (self.head_dim,),
                prefix + "mlp.gate_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.up_proj.weight": (self.intermediate, self.hidden),
                prefix + "mlp.down_proj.weight": (self.hidden, self.intermediate),
            }
        return shapes


def build_tokenizer(extra: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level BPE tokenizer of a few hundred tokens with Qwen3's special tokens, and `extra` whole texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=360, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in (*TAG_TOKENS, *extra)])
    return tokenizer


def _tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }


def _random_tensor(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    noise = rng.standard_normal(shape).astype(np.float32)
    if name.endswith("norm.weight"):
        return 1.0 + 0.2 * noise
    if "embed_tokens" in name or "lm_head" in name:
        return 0.6 * noise
    return noise * (1.4 / np.sqrt(shape[-1])).astype(np.float32)


def _save(tensors: dict[str, np.ndarray], path: Path, dtype: str) -> None:
    if dtype == "bfloat16":
        _save_bfloat16(tensors, path)
        return
    save_file({name: tensor.astype(dtype) for name, tensor in tensors.items()}, str(path), metadata={"format": "pt"})


def _save_bfloat16(tensors: dict[str, np.ndarray], path: Path) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, tensor in tensors.items():
        bits = tensor.astype(np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        blobs.append(rounded.tobytes())
        header[name] = {"dtype": "BF16", "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blobs[-1])]}
        offset += len(blobs[-1])
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + b"".join(blobs))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
