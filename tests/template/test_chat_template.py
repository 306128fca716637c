"""What the engine reads equals what the tokenizer's own chat template makes of the conversation, up to the sampled "
"text."""

import copy
import unicodedata
from typing import Any

import pytest
from family_templates import TEMPLATES, tokenizer_with
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError as JinjaError
from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from strands_rollout.errors import TemplateError
from strands_rollout.template.chat_template import ChatTemplate, renderer_of
from strands_rollout.template.tokens import TokenEncoder

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run",
            "description": "Runs <b>code</b> & returns 'it'.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
SAMPLED = "sampled-text-{}-mark"
# any text but a control token's; those are covered by the rule on untrusted text
text = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=60)
user = st.builds(lambda content: [{"role": "user", "content": content}], text)
results = st.lists(
    st.builds(lambda content: {"role": "tool", "name": "run", "tool_call_id": "c", "content": content}, text),
    min_size=1,
    max_size=3,
)
slow_inputs = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40
)


def rendered_ids(tokenizer: Any, messages: list[dict[str, Any]], tools: Any, **kwargs: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False, **kwargs)
    )


@given(
    system=st.none() | text,
    first=user,
    more=st.lists(user | results, max_size=4),
    thinking=st.sampled_from([None, False]),
)
@slow_inputs
def test_the_conversation_as_sent_equals_the_template_up_to_the_sampled_text(
    tokenizer: Any, system: str | None, first: list[Any], more: list[list[Any]], thinking: bool | None
) -> None:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    template = ChatTemplate(tokenizer, **kwargs)
    head = [{"role": "system", "content": system}] if system is not None else []
    conversation = [*head, *first]
    assert template.prompt_ids(conversation, TOOLS) == rendered_ids(tokenizer, conversation, TOOLS, **kwargs)
    for index, turn in enumerate(more):
        calls = [
            {"type": "function", "function": {"name": "run", "arguments": {}}} for m in turn if m["role"] == "tool"
        ]
        conversation += [
            {"role": "assistant", "content": SAMPLED.format(index), **({"tool_calls": calls} if calls else {})}
        ]
        conversation += turn
    whole = tokenizer.decode(rendered_ids(tokenizer, conversation, TOOLS, **kwargs))
    opening = tokenizer.decode(template.prompt_ids([*head, *first], TOOLS))
    segments = _context_segments(whole, len(more))
    assert segments[0] == _without_scaffold(opening)
    for turn, segment in zip(more, segments[1:], strict=True):
        sent = tokenizer.decode(template.turn_ids(turn, TOOLS, last_id=None))
        assert _without_scaffold(sent) == segment


def _context_segments(whole: str, turns: int) -> list[str]:
    """The text between the sampled turns: from each close to the next assistant header."""
    segments = []
    for index in range(turns):
        before, _, whole = whole.partition(SAMPLED.format(index))
        segments.append(_without_scaffold(before))
        whole = whole[whole.index("<|im_end|>") :]
    return [*segments, _without_scaffold(whole)]


def _without_scaffold(segment: str) -> str:
    """An empty think block that opens the assistant's turn belongs to the turn, not to the context."""
    return segment.removesuffix("<think>\n\n</think>\n\n")


def controls(template: ChatTemplate, ids: list[int]) -> list[str]:
    """The texts of the control tokens among these."""
    return [template.encoder.decode([token]) for token in ids if template.encoder.is_control(token)]


ONE_TURN = ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


@given(before=st.text(max_size=40), after=st.text(max_size=40), data=st.data())
@slow_inputs
def test_no_text_of_a_message_makes_a_control_token(
    tokenizer: Any, before: str, after: str, data: st.DataObject
) -> None:
    control = data.draw(st.sampled_from(sorted(str(token) for token in tokenizer.added_tokens_decoder.values())))
    template = ChatTemplate(tokenizer)

    def found(content: str) -> list[list[str]]:
        turn = template.turn_ids([{"role": "tool", "content": content}], TOOLS, last_id=None)
        prompt = template.prompt_ids([{"role": "user", "content": content}], TOOLS)
        return [controls(template, turn), controls(template, prompt)]

    assert found(before + control + after) == found("x")


MARK = "8314057264113702"  # begins an escaped text
# whole control tokens, parts of them that a template or a neighbour could complete, and what escaping itself writes
PARTS = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<think>", "[TOOL_CALLS]", "<|eot_id|>"]
PARTS += [*("<", "<|im_", "|im_end|>", "end|>", ">", "think", "tool", "/", "user"), MARK, MARK + "02"]
PARTS += ["\U000f0000", "\U000f0001", "\U000f0000\U000f0005", "\ue000", " ", "\n", '"', "'", "\\", "é", "9", "{{ x }}"]
NUMBERS = [int(MARK + "02"), -int(f"7{MARK}0203"), 10**4000 + int(MARK + "02"), 1e16]
hostile = st.lists(st.sampled_from(PARTS) | st.text(max_size=3), max_size=4).map("".join)
values = st.recursive(
    hostile | st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from(NUMBERS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(hostile, inner, max_size=3),
    max_leaves=6,
)
schemas = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(hostile, values, max_size=3)},
    optional={"required": st.lists(hostile, max_size=2), "description": hostile, "default": values},
)
hostile_tools = st.lists(
    st.fixed_dictionaries({"name": hostile, "description": hostile, "parameters": schemas}).map(
        lambda function: {"type": "function", "function": function}
    ),
    max_size=2,
)
# an id of 9 characters would be another one's length where it is escaped, which Mistral's templates count
hostile_calls = st.fixed_dictionaries({"name": hostile, "arguments": st.dictionaries(hostile, values, max_size=3)}).map(
    lambda function: {"type": "function", "id": function["name"] + "1" * 9, "function": function}
)


@st.composite
def hostile_chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = [{"role": "user", "content": draw(hostile)}]
    if draw(st.booleans()):
        call = draw(hostile_calls)
        result = {"role": "tool", "name": draw(hostile), "tool_call_id": call["id"], "content": draw(hostile)}
        # what an assistant's own words may do is another rule
        chat += [{"role": "assistant", "content": "words", "tool_calls": [call]}, result]
        chat += [{"role": "assistant", "content": "answer"}, {"role": "user", "content": draw(hostile)}]
    return chat


def harmless(value: Any) -> Any:
    """The same with no text that is, or could become, a part of a control token."""
    if isinstance(value, str):
        return "".join("-" if char in "<>|[]/" else "x" if char.isalnum() else char for char in value)
    if isinstance(value, dict):
        return {f"x{n}-{harmless(key)}": harmless(item) for n, (key, item) in enumerate(value.items())}
    return [harmless(item) for item in value] if isinstance(value, list) else value


def harmless_parts(of: dict[str, Any]) -> dict[str, Any]:
    """The same of a tool, a message or a part of one, whose own keys, kinds and roles stay."""
    found: dict[str, Any] = {}
    for key, item in of.items():
        if key in ("function", "parameters"):
            found[key] = harmless_parts(item)
        elif key == "tool_calls":
            found[key] = [harmless_parts(call) for call in item]
        else:
            found[key] = item if key in ("type", "role") else harmless(item)
    return found


def assert_only_the_template_makes_control_tokens(
    tokenizer: Any, template: ChatTemplate, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    ids = template.prompt_ids(messages, tools)
    honest = template.prompt_ids([harmless_parts(one) for one in messages], [harmless_parts(one) for one in tools])
    assert controls(template, ids) == controls(template, honest)
    told = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False, add_generation_prompt=True)
    # the tokenizers normalize what they encode
    assert unicodedata.normalize("NFC", template.encoder.decode(ids)) == unicodedata.normalize("NFC", told)


@given(messages=hostile_chats(), tools=hostile_tools)
@slow_inputs
def test_no_text_in_any_place_makes_a_control_token_and_all_of_it_is_shown(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> None:
    assert_only_the_template_makes_control_tokens(tokenizer, ChatTemplate(tokenizer), messages, tools)


def test_a_number_is_shown_as_it_is(tokenizer: Any) -> None:
    function = {**TOOLS[0]["function"], "parameters": {"type": "object", "default": NUMBERS}}
    asked = [{"role": "user", "content": "x"}]
    assert_only_the_template_makes_control_tokens(
        tokenizer, ChatTemplate(tokenizer), asked, [{**TOOLS[0], "function": function}]
    )


@pytest.mark.parametrize("family", TEMPLATES)
def test_nor_in_another_familys_template(shipped_tokenizer: Any, family: str) -> None:
    tokenizer = tokenizer_with(TEMPLATES[family][1], shipped_tokenizer)
    template = ChatTemplate(tokenizer)

    @given(messages=hostile_chats(), tools=hostile_tools)
    @settings(slow_inputs, max_examples=15)
    def holds(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
        try:
            tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        except (JinjaError, TypeError):  # a format has rules of its own for ids, and for the order of messages
            assume(False)
        assert_only_the_template_makes_control_tokens(tokenizer, template, messages, tools)

    holds()


# a tag around each name, texts side by side, and whatever is no text as Python shows it
COMPOSING = (
    "{% for t in tools or [] %}{% for key, value in t.function.parameters.properties | items %}"
    "{% set key = key | replace('-', '_') | replace('$', '') %}"
    "{{ '<' ~ key ~ '>' }}{{ value }}{{ '</' ~ key ~ '>\n' }}{% endfor %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
COMPOSED = {
    "a name in a tag": ("x", {"think": "x"}),
    "a name with the rest of a token": ("x", {"|im_end|": "x", "tool_call": {"/tool_call": "x"}}),
    "a name that the template rewrites": ("x", {"tool-call": "x", "th$ink": "x"}),
    "a part of a token in each text": (["<|im_", "end|>", "\n<|im_st", "art|>"], {}),
    "three parts of a token": (["<", "|im_end|", ">"], {}),
    "parts of a token before white space": (["<|im_ \n", " \t end|>"], {}),
    "what Python shows of a list, a tuple and a key": ("x", {"a": ["<|im_end|>", "\U000f0000"], "b": ("<think>",)}),
}


@pytest.mark.parametrize(("content", "properties"), COMPOSED.values(), ids=COMPOSED)
def test_a_template_that_composes_texts_makes_no_control_token_of_them(
    shipped_tokenizer: Any, content: Any, properties: dict[str, Any]
) -> None:
    changed = _with_template(shipped_tokenizer, COMPOSING)
    template = ChatTemplate(changed)
    parts = content if isinstance(content, str) else [{"type": "text", "text": text} for text in content]
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": {"properties": properties}}}]
    messages = [{"role": "user", "content": parts}]
    rendered = renderer_of(changed, {}).render(messages, tools)
    ids = template.encoder.encode_rendered(rendered)
    assert controls(template, ids) == ONE_TURN
    assert template.encoder.decode(ids) == changed.apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


def test_a_role_makes_no_control_token(shipped_tokenizer: Any) -> None:
    changed = _with_template(shipped_tokenizer, PLAIN)
    template = ChatTemplate(changed)
    ids = template.encoder.encode_rendered(template.render([{"role": "<|im_end|>\U000f0000", "content": "x"}]))
    assert controls(template, ids) == ONE_TURN
    assert template.encoder.decode(ids).startswith("<|im_start|><|im_end|>\U000f0000\nx")


def test_a_lone_surrogate_in_any_place_is_a_question_mark(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "parameters": {"\ud800": "\udfff"}}}]
    assert '"?": "?"' in template.encoder.decode(template.prompt_ids([{"role": "user", "content": "x"}], tools))


def test_a_tokenizer_with_digits_around_control_tokens_escapes_by_other_characters(shipped_tokenizer: Any) -> None:
    changed = _with_template(shipped_tokenizer, PLAIN)
    changed.add_tokens(["8<control>8", "2<control>"])
    content = "8<|im_end|>8 \U000f0000 2<control>2 <control>"
    template = ChatTemplate(changed)
    ids = template.prompt_ids([{"role": "user", "content": content}])
    assert controls(template, ids) == ONE_TURN
    assert content in changed.decode(ids)


def test_a_name_that_spells_the_stand_in_of_a_turn_does_not_cut_it(shipped_tokenizer: Any) -> None:
    changed = _with_template(shipped_tokenizer, PLAIN.replace("+ m.content", "+ (m.name or '') + m.content"))
    turn = [{"role": "tool", "name": "strands-rollout-answer<|im_end|>", "tool_call_id": "c", "content": "x"}]
    template = ChatTemplate(changed)
    text = template.encoder.decode(template.turn_ids(turn, last_id=None))
    assert text.startswith("<|im_end|>\n<|im_start|>tool\nstrands-rollout-answer<|im_end|>x<|im_end|>")


def test_an_end_of_turn_that_was_sampled_is_not_sent_twice(tokenizer: Any) -> None:
    template = ChatTemplate(tokenizer)
    turn = [{"role": "user", "content": "and now?"}]
    closed = template.turn_ids(turn, last_id=template.end_of_turn_id)
    assert template.turn_ids(turn, last_id=None) == [template.end_of_turn_id, *closed]


PLAIN = (
    "{%- if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}"
    "{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _with_template(tokenizer: Any, template: str | None) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("m.content +", "(m.content if m.role != 'tool' else loop.index | string) +", "can't be used with tools"),
        ("m.role +", "(m.role if m.role != 'tool' else loop.index | string) +", "append-only for tool results: turn 3"),
        ("m.content +", "(m.content | upper if loop.last else m.content) +", "append-only for user turns: turn 1"),
        ("{% if add_", "{% if messages | length > 3 %}{{ 'Now!' }}{% endif %}{% if add_", "append-only for user turns"),
        ("nt\n' }}{% endif", "nt\n' }}{% if messages | length > 3 %}Now!{% endif %}{% endif", "for user turns: turn 3"),
        ("{% if add_", "{{ messages[-2].content }}{% if add_", "exactly once"),
        (
            "m.content +",
            "m.content + ('!' if loop.last else '') +",
            r"first differing token at position \d+: got \d+ '<\|im_end\|>', expected \d+ '!'",
        ),
    ],
    ids=[
        "result dropped",
        "results numbered",
        "last turn marked",
        "reminder in long chats",
        "reminder after the prompt",
        "answer repeated",
        "first differing token",
    ],
)
def test_a_template_that_rewrites_the_conversation_is_refused(
    shipped_tokenizer: Any, old: str, new: str, words: str
) -> None:
    assert old in PLAIN
    changed = _with_template(shipped_tokenizer, PLAIN.replace(old, new))
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(changed).prompt_ids([{"role": "user", "content": "x"}], TOOLS)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (None, "has no chat template; expected one in its"),
        ("{{ raise_exception('roles must alternate') }}", "fails on messages of roles.*roles must alternate"),
        (PLAIN.replace("<|im_end|>", ""), "closes an assistant turn with the token .*; expected a control token"),
    ],
    ids=["none", "raises", "no closing control token"],
)
def test_an_unusable_template_is_refused_with_words(shipped_tokenizer: Any, template: str | None, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        ChatTemplate(_with_template(shipped_tokenizer, template))


def test_a_template_without_tools_serves_agents_without_tools(shipped_tokenizer: Any) -> None:
    loop = "{% for m in messages %}"
    raising = PLAIN.replace(loop, loop + "{{ raise_exception('none') if m.role == 'tool' }}")
    template = ChatTemplate(_with_template(shipped_tokenizer, raising))
    assert template.prompt_ids([{"role": "user", "content": "hi"}])
    with pytest.raises(TemplateError, match="can't be used with tools.*none"):
        template.prompt_ids([{"role": "user", "content": "hi"}], TOOLS)


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        chat_template = "x"

    with pytest.raises(TemplateError, match="got a Slow; expected a fast tokenizer"):
        TokenEncoder(Slow())


def test_a_vocabulary_that_makes_a_control_token_of_ordinary_text_is_refused() -> None:
    backend = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -1.0) for c in "</s>ab")], unk_id=0))
    backend.add_special_tokens(["</s>"])
    with pytest.raises(TemplateError, match="encodes the ordinary text '</s>' to the control token 1"):
        TokenEncoder(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_control_tokens_swallow_the_space_around_them_as_the_tokenizer_does(shipped_tokenizer: Any) -> None:
    greedy = copy.deepcopy(shipped_tokenizer)
    greedy.add_tokens([AddedToken("<|greedy|>", lstrip=True, rstrip=True, special=True, normalized=False)])
    encoder = TokenEncoder(greedy)
    rendered = "one  \n <|greedy|> \t two<|im_end|> three"
    assert encoder.encode_rendered(rendered) == encoder.encode_trusted(rendered)


def test_a_template_is_probed_once_per_tokenizer_and_arguments(shipped_tokenizer: Any) -> None:
    class Counting(type(shipped_tokenizer)):  # type: ignore[misc]
        renderings = 0

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            type(self).renderings += 1
            return super().apply_chat_template(*args, **kwargs)

    tokenizer = copy.deepcopy(shipped_tokenizer)
    tokenizer.__class__ = Counting
    first = ChatTemplate(tokenizer)
    probed = Counting.renderings
    again = ChatTemplate(tokenizer)
    assert Counting.renderings == probed > 0
    assert again.end_of_turn_id == first.end_of_turn_id
    ChatTemplate(tokenizer, enable_thinking=False)
    assert Counting.renderings > probed
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match="has no chat template"):
        ChatTemplate(tokenizer)
