"""Run one episode through `generate` against the fake SGLang, as slime would. Most behavior tests start here."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fake_sglang import FakeSGLang, Reply

from strands_rollout import Sample, generate

TOOL_CALL = '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
ANSWER = "The answer is \\boxed{34}.<|im_end|>"
Script = Callable[[dict[str, Any], int], "str | Reply"] | Sequence["str | Reply"]


def call_text(code: str = "print(17 * 2)", name: str = "execute_python_code") -> str:
    """Return the text of a turn that calls a tool with the argument `code`."""
    return TOOL_CALL.format(name=name, arguments=json.dumps({"code": code}))


def args_for(base_url: str, tokenizer: Any, **more: Any) -> SimpleNamespace:
    """Return a stand-in for slime's args with the checkpoint, the router's address, and the attributes in `more`."""
    host, port = base_url.removeprefix("http://").split(":")
    return SimpleNamespace(
        hf_checkpoint=str(Path(tokenizer.name_or_path)), sglang_router_ip=host, sglang_router_port=int(port), **more
    )


@dataclass(frozen=True)
class Run:
    """A finished episode: its sample, and the requests and replies of its engine."""

    sample: Any
    fake: FakeSGLang
    replied: list[Reply]
    tokenizer: Any

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.sample.metadata["strands_rollout"])

    @property
    def prompt_length(self) -> int:
        return len(self.sample.tokens) - self.sample.response_length

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def context_after(self, turn: int) -> str:
        """Return the text of the context between turn `turn` and the next one, as sent to the engine."""
        return self.decode(self.context_ids_after(turn))

    def context_ids_after(self, turn: int) -> list[int]:
        """Return the ids of the context between turn `turn` and the next one, as sent to the engine."""
        first, second = self.fake.requests[turn].input_ids, self.fake.requests[turn + 1].input_ids
        return second[len(first) + len(self.replied[turn].ids) :]


async def run(
    tokenizer: Any,
    script: Script,
    *,
    prompt: Any = "What is 17 * 2?",
    params: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    sample: Any = None,
    args: Mapping[str, Any] | None = None,
    **server: Any,
) -> Run:
    """Play and return one episode. A string in `script` is a turn, tokenized as the policy would have sampled it."""
    replied: list[Reply] = []

    def next_reply(request: dict[str, Any], number: int) -> Reply:
        item = script(request, number) if callable(script) else script[number]
        replied.append(Reply.tokens(ids_of(tokenizer, item)) if isinstance(item, str) else item)
        return replied[-1]

    async with FakeSGLang(next_reply, **{"context_length": 8192, **server}) as fake:
        namespace = args_for(fake.base_url, tokenizer, strands_rollout=settings, **(args or {}))
        sample = sample or Sample(prompt=prompt, label="34", index=0)
        result = await generate(namespace, sample, {"temperature": 1.0, "max_new_tokens": 4096, **(params or {})})
    return Run(result, fake, replied, tokenizer)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return the ids of a turn's text, control tokens included."""
    return list(tokenizer.encode(text, add_special_tokens=False))
