# ruff: noqa: RUF001 - DeepSeek's own characters
"""Short chat templates in each model family's published format: role tokens, tools, calls, results and end tokens.

They leave out dates, images and most default prompts. They keep what is difficult: text and reasoning that later turns
drop or rewrite, turns that end with several tokens or none, refused histories. The modules of the parsers name the
sources.
"""

import copy
import re
from importlib.resources import files
from typing import Any


def shipped_template(name: str) -> str:
    """Return the text of a template that ships with the package."""
    return (files("strands_rollout.template") / f"{name}.jinja").read_text(encoding="utf-8")


CHATML = """
{%- if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call them as <tool_call>...</tool_call>, after <think>...</think>.<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}
<tool_response>\n{{ message.content }}\n</tool_response>
{%- if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}
{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}
{%- for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""

HERMES = CHATML.replace(
    "CALL",
    """
<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>""",
)
QWEN3_CODER = CHATML.replace(
    "CALL",
    """
<tool_call>\n<function={{ call.function.name }}>
{% for key, value in call.function.arguments | items %}<parameter={{ key }}>
{{ value if value is string else value | tojson }}\n</parameter>
{% endfor %}</function>\n</tool_call>""",
)
GLM4 = """[gMASK]<sop>
{%- if tools %}<|system|>\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'system' %}<|system|>\n{{ message.content }}
{%- elif message.role == 'user' %}<|user|>\n{{ message.content }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<|observation|>{% endif %}
<tool_response>\n{{ message.content }}\n</tool_response>
{%- elif message.role == 'assistant' %}<|assistant|>\n<think></think>\n{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{{ call.function.name }}
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
GLM47 = (
    GLM4.replace("<|assistant|>\n<think></think>\n", "<|assistant|></think>")
    .replace("<|assistant|>{% endif %}", "<|assistant|><think>{% endif %}")
    .replace("</arg_key>\n", "</arg_key>")
    .replace("</arg_value>\n", "</arg_value>")
    .replace("\n<tool_call>{{ call.function.name }}\n", "{{- '' }}<tool_call>{{ call.function.name }}")
)
KIMI_K2 = """
{%- if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|>{{ message.content }}
{%- if message.tool_calls %}<|tool_calls_section_begin|>
{%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id -}}
<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}<|tool_calls_section_end|>
{%- endif %}<|im_end|>
{%- elif message.role == 'tool' -%}
<|im_system|>tool<|im_middle|>## Return of {{ message.tool_call_id }}\n{{ message.content }}<|im_end|>
{%- else %}<|im_user|>user<|im_middle|>{{ message.content }}<|im_end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
DEEPSEEK = """<｜begin▁of▁sentence｜>
{%- if tools %}## Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜User｜>{{ message.content }}<｜Assistant｜></think>
{%- elif message.role == 'tool' %}<｜tool▁output▁begin｜>{{ message.content }}<｜tool▁output▁end｜>
{%- elif message.role == 'assistant' %}{{ message.content }}CALLS<｜end▁of▁sentence｜>
{%- endif %}
{%- endfor %}"""
DEEPSEEK_V3 = DEEPSEEK.replace("</think>", "").replace(
    "CALLS",
    """
{%- if message.tool_calls %}<｜tool▁calls▁begin｜>
{%- for call in message.tool_calls -%}
<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ call.function.name }}
```json
{{ '' + call.function.arguments }}
```<｜tool▁call▁end｜>
{%- endfor %}<｜tool▁calls▁end｜>
{%- endif %}""",
)
# the generation prompt opens reasoning, which later renderings of the turn leave out
DEEPSEEK_V32 = (
    DEEPSEEK.replace("<｜Assistant｜></think>", "{{ '' if loop.last else '<｜Assistant｜></think>' }}")
    + "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜><think>{% endif %}"
).replace(
    "CALLS",
    """
{%- if message.tool_calls %}\n\n<｜DSML｜function_calls>
{% for call in message.tool_calls -%}
<｜DSML｜invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items -%}
<｜DSML｜parameter name="{{ key }}" string="{{ 'true' if value is string else 'false' }}">
{{- value if value is string else value | tojson }}</｜DSML｜parameter>
{% endfor -%}
</｜DSML｜invoke>
{% endfor -%}
</｜DSML｜function_calls>
{%- endif %}""",
)
# tool results stand in a user's turn
DEEPSEEK_V4 = (
    DEEPSEEK_V32.replace("function_calls>", "tool_calls>")
    .replace("<｜tool▁output▁begin｜>", "{{ '\\n\\n' if loop.previtem.role == 'tool' else '<｜User｜>' }}<tool_result>")
    .replace("<｜tool▁output▁end｜>", "</tool_result>{{ END if not loop.last and loop.nextitem.role != 'tool' }}")
    .replace("END", "'<｜Assistant｜></think>'")
    .replace("and messages[-1].role == 'user' %}", "%}")
)
LOOP = "{%- for call in message.tool_calls or [] %}CALL{% endfor %}"
MINIMAX_M2 = (
    CHATML.replace("<|im_start|>", "]~b]")
    .replace("<|im_end|>", "[e~[")
    .replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    .replace(
        LOOP,
        """{%- if message.tool_calls %}\n<minimax:tool_call>
{% for call in message.tool_calls %}<invoke name="{{ call.function.name }}">
{% for key, value in call.function.arguments | items -%}
<parameter name="{{ key }}">{{ value if value is string else value | tojson }}</parameter>
{% endfor %}</invoke>
{% endfor %}</minimax:tool_call>{% endif %}""",
    )
)
_PYTHONIC = """{%- if message.tool_calls %}[
{%- for call in message.tool_calls %}{{ ', ' if not loop.first }}{{ call.function.name }}(
{%- for key, value in call.function.arguments | items %}{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}
{%- endfor %}){% endfor %}]{% endif %}"""
LFM2 = CHATML.replace(LOOP, _PYTHONIC.replace("[\n", "<|tool_call_start|>[\n").replace("]{%", "]<|tool_call_end|>{%"))
PYTHONIC = """<|begin_of_text|>
{%- if tools %}<|header_start|>system<|header_end|>\n\n{{ tools | tojson }}<|eot|>{% endif %}
{%- for message in messages %}<|header_start|>{{ message.role.replace('tool', 'ipython') }}<|header_end|>\n
{{ message.content | tojson if message.role == 'tool' else message.content }}CALLS<|eot|>
{%- endfor %}
{%- if add_generation_prompt %}<|header_start|>assistant<|header_end|>\n
{% endif %}""".replace("CALLS", _PYTHONIC)
HUNYUAN_A13B = """<|startoftext|>
{%- if tools %}{{ tools | tojson }}<|extra_4|>{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response><|extra_0|>
{%- elif message.role == 'user' %}{{ message.content }}<|extra_0|>
{%- else %}{{ message.content }}
{%- if message.tool_calls %}<tool_calls>[
{%- for call in message.tool_calls %}{{ ', ' if not loop.first }}{{ call.function | tojson }}{% endfor -%}
]</tool_calls>{% endif %}<|eos|>
{%- endif %}
{%- endfor %}"""
HUNYUAN3 = """<｜hy_begin_of_sentence｜>
{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}<｜hy_User｜>{{ message.content }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}<tool_responses>\n{% endif -%}
<tool_response>\n{{ message.content }}\n</tool_response>
{{ '</tool_responses>' if loop.last or loop.nextitem.role != 'tool' }}
{%- else %}<｜hy_Assistant｜><think></think>{{ message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_calls>' if loop.first }}
<tool_call>{{ call.function.name }}<tool_sep>
{% for key, value in call.function.arguments | items %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{{ '\\n</tool_calls>' if loop.last }}
{%- endfor %}<｜hy_eos｜>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<｜hy_Assistant｜><think></think>{% endif %}"""
HUNYUAN3 = re.sub(r"(</?(?:tool_\w+|arg_\w+|think)|<｜hy_\w+)(｜?>)", r"\1:opensource\2", HUNYUAN3)
LLAMA3 = """<|begin_of_text|>
{%- for message in messages %}
{%- if message.role == 'user' %}<|start_header_id|>user<|end_header_id|>\n
{% if loop.first and tools %}Respond in the format {"name": function name, "parameters": {...}}.
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% endif %}{{ message.content }}<|eot_id|>
{%- elif message.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n
{{ {'output': message.content} | tojson }}<|eot_id|>
{%- elif message.tool_calls %}<|start_header_id|>assistant<|end_header_id|>\n
{%- if message.tool_calls | length > 1 %}{{ raise_exception('single tool-calls only') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>
{%- else %}<|start_header_id|>assistant<|end_header_id|>\n
{{ message.content }}<|eot_id|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n
{% endif %}"""
MISTRAL = """<s>
{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- elif message.role == 'tool' %}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]
{%- elif message.role == 'assistant' %}{{ message.content }}CALLS</s>
{%- endif %}
{%- endfor %}"""
# tools stand before the last user turn; if that turn is the last message, it begins with the system message
MISTRAL_NEMO = """<s>
{%- set users = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools and message == users[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif -%}
[INST]{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif -%}
{{ message.content }}[/INST]
{%- elif message.tool_calls %}[TOOL_CALLS][
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids of 9 characters only') }}{% endif -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last }}
{%- endfor %}]</s>
{%- elif message.role == 'tool' -%}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception('ids of 9 characters only') }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message.content }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]
{%- elif message.role == 'assistant' %}{{ message.content }}</s>
{%- endif %}
{%- endfor %}"""
MISTRAL_NAMED = MISTRAL.replace(
    "CALLS",
    """
{%- for call in message.tool_calls or [] -%}
[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}
{%- endfor %}""",
)
MISTRAL_ARRAY = MISTRAL.replace(
    "CALLS",
    """
{%- if message.tool_calls %}[TOOL_CALLS] [
{%- for call in message.tool_calls -%}
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}
{{- ', ' if not loop.last }}
{%- endfor %}]
{%- endif %}""",
)
GPT_OSS = """<|start|>system<|message|># Valid channels: analysis, commentary, final.<|end|>
{%- if tools or messages[0].role == 'system' %}<|start|>developer<|message|>
{%- if messages[0].role == 'system' %}# Instructions\n\n{{ messages[0].content }}\n\n{% endif %}
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<|end|>
{%- endif %}
{%- set called = namespace(name=none) %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant')
    | rejectattr('tool_calls', 'defined') | list %}
{%- if message.content and not later -%}
<|start|>assistant<|channel|>analysis<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- set call = message.tool_calls[0].function -%}
<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary json<|message|>
{{- call.arguments | tojson }}<|call|>
{%- set called.name = call.name %}
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content -}}
{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' -%}
<|start|>functions.{{ called.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- elif message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|end|>
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# results stand inside the model's turn, before the text of the turn with the calls; a generation prompt that does not
# follow results contains an empty thought
GEMMA4 = """
{%- macro shown(value) -%}
{%- if value is string -%}<|"|>{{ value }}<|"|>
{%- elif value is mapping -%}{
{%- for key, inner in value | items %}{{ ',' if not loop.first }}{{ key }}:{{ shown(inner) }}{% endfor %}}
{%- elif value is iterable -%}[
{%- for inner in value %}{{ ',' if not loop.first }}{{ shown(inner) }}{% endfor %}]
{%- else -%}{{ value | tojson }}{%- endif -%}
{%- endmacro -%}
<bos>
{%- if tools %}<|turn>system{{ '\\n' }}
{%- for tool in tools %}<|tool>{{ tool | tojson }}<tool|>{% endfor %}<turn|>{{ '\\n' }}{% endif %}
{%- set turn = namespace(role='', results=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}<|turn>user{{ '\\n' + message.content }}<turn|>{{ '\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|turn>model\\n' if turn.role == 'user' }}
{%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}
{{- shown(call.function.arguments) }}<tool_call|>{% endfor %}
{%- set turn.results = 0 %}
{%- for answer in messages[loop.index:] if message.tool_calls %}
{%- if answer.role == 'tool' and turn.results == loop.index0 %}{% set turn.results = loop.index -%}
<|tool_response>response:{{ answer.name }}{value:<|"|>{{ answer.content }}<|"|>}<tool_response|>{% endif %}
{%- endfor %}
{{- '<|tool_response>' if message.tool_calls and not turn.results }}{{ message.content }}
{{- '<turn|>\\n' if not message.tool_calls }}{% endif %}
{%- set turn.role = message.role if message.role != 'tool' else turn.role %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' -%}
<|turn>model{{ '\\n<|channel>thought\\n<channel|>' }}{% endif %}"""
# the generation prompt opens reasoning, whose tags are three tokens each; answers have tags too
KIMI_K3 = """
{%- if tools %}<|open|>message role="system"<|sep|>{{ tools | tojson }}<|close|>message<|sep|><|end_of_msg|>{% endif %}
{%- for message in messages %}<|open|>message role="{{ message.role }}"<|sep|>
{%- if message.role == 'assistant' -%}
<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>{{ message.content }}<|close|>response<|sep|>
{%- for call in message.tool_calls or [] -%}
{%- if loop.first %}<|open|>tools<|sep|>{% endif -%}
<|open|>call tool="{{ call.function.name }}" index="{{ loop.index }}"<|sep|>
{%- for key, value in call.function.arguments | items -%}
<|open|>argument key="{{ key }}" type="{{ 'string' if value is string else 'boolean' if value is boolean else
    'null' if value is none else 'number' if value is number else 'object' if value is mapping else 'array' -}}
"<|sep|>{{ value if value is string else value | tojson }}<|close|>argument<|sep|>{% endfor -%}
<|close|>call<|sep|>{% if loop.last %}<|close|>tools<|sep|>{% endif %}
{%- endfor %}
{%- else %}{{ message.content }}{% endif %}<|close|>message<|sep|><|end_of_msg|>
{%- endfor %}
{%- if add_generation_prompt %}<|open|>message role="assistant"<|sep|><|open|>think<|sep|>{% endif %}"""
# the template reads the tools from the variable `xml_tools`, and writes no calls
SMOLLM3 = CHATML.replace("tools", "xml_tools").replace("tool | tojson", "tool | string").replace("CALL", "")
# the generation prompt holds a whole thought, as with a thinking budget of 0; later renderings leave it out
SEED_OSS = (
    QWEN3_CODER.replace("tool_call>", "seed:tool_call>")
    .replace(">\n{{ value", ">{{ value")
    .replace("tojson }}\n</param", "tojson }}</param")
    .replace("<|im_start|>", "<seed:bos>")
    .replace("<|im_end|>", "<seed:eos>")
    .replace(
        "assistant\n{% endif %}",
        "assistant\n<seed:think><seed:cot_budget_reflect>I answer.</seed:cot_budget_reflect></seed:think>{% endif %}",
    )
)
# without `reasoning`, the generation prompt holds an empty thought; later renderings start the response in its place
COMMAND_R7B = """<BOS_TOKEN>
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}<|START_OF_TURN_TOKEN|>
{%- if message.role == 'assistant' %}<|CHATBOT_TOKEN|><|START_RESPONSE|>{{ message.content }}<|END_RESPONSE|>
{%- elif message.role == 'tool' %}<|SYSTEM_TOKEN|><|START_TOOL_RESULT|>{{ message.content }}<|END_TOOL_RESULT|>
{%- else %}<|USER_TOKEN|>{{ message.content }}{% endif %}<|END_OF_TURN_TOKEN|>
{%- endfor %}
{%- if add_generation_prompt -%}
<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|>{{ '' if reasoning else '<|END_THINKING|>' }}
{%- endif %}"""

# the next user turn closes the model's turn; results stand in the open turn, and a generation prompt opens another turn
APERTUS = """<s>
{%- if tools %}<|developer_start|>{{ tools | tojson }}<|developer_end|>{% endif %}
{%- for message in messages %}
{%- set before = '' if loop.first else loop.previtem.role %}
{%- if message.role == 'tool' %}{{ ', ' if before == 'tool' else '[' }}{{ message.content }}
{%- elif message.role == 'user' %}
{{- '<|assistant_end|>' if before == 'assistant' }}<|user_start|>{{ message.content }}<|user_end|>
{%- else %}{{ ']' if before == 'tool' else '<|assistant_start|>' }}{{ message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<|tools_prefix|>[' if loop.first else ', ' }}{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}
{{- ']<|tools_suffix|>' if loop.last }}
{%- endfor %}
{%- endif %}
{%- endfor %}
{{- ']' if messages[-1].role == 'tool' }}{{ '<|assistant_start|>' if add_generation_prompt }}"""

MUSE_GLIMMER = """<|start|>system<|message|>
{%- if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}You are a helpful AI assistant.{% endif %}
{%- for tool in tools or [] %}\n{{ tool.function | tojson }}{% endfor %}\n\n# Valid recipients: "self"
{%- for tool in tools or [] %}, "{{ tool.function.name.split('.')[0] }}.*"{% endfor %}, "user".<|eot|>
{%- for message in messages %}
{%- if message.role == 'user' %}<|start|>user<|message|>{{ message.content }}<|eot|>
{%- elif message.role == 'tool' %}
{%- set called = namespace(name='') %}
{%- for one in messages %}{% for call in one.tool_calls or [] %}
{%- if call.id == message.tool_call_id %}{% set called.name = call.function.name %}{% endif %}
{%- endfor %}{% endfor -%}
<|start|>tool {{ called.name }}<|message|><tool_output name="{{ called.name }}">\n{{ message.content -}}
{{ '\n' }}</tool_output><|eot|>
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content -%}
<|start|>assistant to=self<|message|>{{ message.reasoning_content }}<|eom|>
{%- endif %}
{%- for call in message.tool_calls or [] -%}
{%- set name = call.function.name -%}
<|start|>assistant to={{ name }}<|message|><atem:function_calls>\n<atem:invoke name="{{ name }}">
{% for key, value in call.function.arguments.items() -%}
<atem:parameter name="{{ key }}">{{ value if value is string else value | tojson }}</atem:parameter>
{% endfor -%}
</atem:invoke>\n</atem:function_calls>
{{- '<|eot|>' if loop.last else '<|eom|>' }}
{%- else -%}
<|start|>assistant to=user<|message|>{{ message.content }}<|eot|>
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

TEMPLATES: dict[str, tuple[str, str]] = {
    "hermes": ("hermes", HERMES),
    "qwen3_coder": ("qwen3_coder", QWEN3_CODER),
    "glm4": ("glm4", GLM4),
    "glm4-7": ("glm4", GLM47),
    "kimi_k2": ("kimi_k2", KIMI_K2),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK_V3),
    "deepseek_v3-1": ("deepseek_v3", shipped_template("deepseek_v3_1_tools")),
    "deepseek_v3-2": ("deepseek_v3", DEEPSEEK_V32),
    "deepseek_v4": ("deepseek_v4", DEEPSEEK_V4),
    "minimax_m2": ("minimax_m2", MINIMAX_M2),
    "muse_glimmer": ("muse_glimmer", MUSE_GLIMMER),
    "seed_oss": ("seed_oss", SEED_OSS),
    "gemma4": ("gemma4", GEMMA4),
    "apertus": ("apertus", APERTUS),
    "kimi_k3": ("kimi_k3", KIMI_K3),
    "lfm2": ("lfm2", LFM2),
    "pythonic": ("pythonic", PYTHONIC),
    "hunyuan3": ("hunyuan3", HUNYUAN3),
    "hunyuan_a13b": ("hunyuan_a13b", HUNYUAN_A13B),
    "llama3_json": ("llama3_json", LLAMA3),
    "mistral-array": ("mistral", MISTRAL_ARRAY),
    "mistral-nemo": ("mistral", MISTRAL_NEMO),
    "mistral-named": ("mistral", MISTRAL_NAMED),
    "gpt_oss": ("gpt_oss", GPT_OSS),
}
"""Parser name and template by the id of the family."""
CONTEXT_ONLY_TEMPLATES: dict[str, str] = {
    "command_r7b": COMMAND_R7B,
    "smollm3": SMOLLM3,
    "deepseek_r1_tools": shipped_template("deepseek_r1_tools"),
    "hermes_tools": shipped_template("hermes_tools"),
}
"""Templates of which only the context is compared: they write no calls, or have no parser of their own."""

_CONTROL = re.compile(
    r"<\|?[a-z_]+\|>|<\|[a-z_]+>|<\|[A-Z_]+\|>|<｜[^｜<>]+｜>|\[/?[A-Z_]{4,}\]|\[gMASK\]|<sop>|</?s>|</?seed:\w+>|<\|\"\|>"
    r"|<bos>|<BOS_TOKEN>|\]~b\]|\[e~\["
)


def tokenizer_with(template: str, tokenizer: Any) -> Any:
    """Return a copy of a tokenizer with this template and its control tokens."""
    own = copy.deepcopy(tokenizer)
    tokens = sorted(set(_CONTROL.findall(template)) - set(own.get_added_vocab()))
    own.add_tokens(tokens, special_tokens=True)
    own.chat_template = template
    return own
