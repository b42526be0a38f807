"""Chat templates in the manner of the common model families, and conversations to render with them."""

from __future__ import annotations

from typing import Any

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(asking=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.asking and message.role == "user" and message.content is string
        and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.asking = false %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<|im_start|>' + message.role + '\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
                {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.name ~ '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA = """\
{{- bos_token }}
{%- if custom_tools is defined %}
    {%- set tools = custom_tools %}
{%- endif %}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none and not tools_in_user_message is defined %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{% for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
        {{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}" }}
        {{- "<|eot_id|>" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{#- Turns alternate, but for tools. #}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val|tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function|tojson %}
            {{- out[:-1] }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "}]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content|string + "}[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported, with the exception of an initial system!") }}
    {%- endif %}
{%- endfor %}
"""

PARTS = """\
{{ bos_token }}
{% for message in messages %}
<{{ message.role }}>
    {% if message.content is string %}
{{ message.content }}
    {% else %}
        {% for part in message.content %}
            {% if part.type == 'text' %}
{{ part.text | trim }}
            {% else %}
                {% continue %}
            {% endif %}
        {% endfor %}
    {% endif %}
    {% if loop.index > 20 %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<assistant>
{% endif %}
"""

# The odd corners: whitespace control, scopes, macros, filters, functions, loop variables.
CORNERS = """\
{% macro turn(name, text='') %}<{{ name | upper }}>{{ text }}{{ caller() if caller }}</{{ name }}>{% endmacro %}
{% set total = 0 %}
  {% set block %}
  {{ messages | length }} messages: {{ messages | map(attribute='role') | join(', ') }}
  {% endset %}
{{ block | trim }} {{ strftime_now('%%') }} {{ undefined_thing }}|{{ none }}|{{ 1.5 }}|{{ [1, 'a', {'b': none}] }}|
{% for message in messages recursive %}
    {% set total = total + 1 %}
    {{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.cycle('odd', 'even') }} {{ loop.changed(message.role) }}
    {% generation %}
    {% set inner = message.content | default('') | string %}
    {% set total = 50 %}{{ total }} {{ turn(message.role, inner | replace('\\n', ' ') | truncate(300)) }}
    {% endgeneration %}
    {{ total }} {{ inner }}
    {% call turn('call') %}{{ '%s-%03d' % (message.role, loop.index) }} {{ '{:>6}'.format('ab') }}{% endcall %}
    {%- if message.children %}{{ loop(message.children) }}{% endif %}
{% else %}
nothing
{% endfor %}
{{ total }} {{ range(3) | list }} {{ dict(a=1, b='<&>') | tojson }} {{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true) }}
{{ 'a' ~ 1 ~ none ~ true }} {{ 'ab' * 3 }} {{ 2 ** 10 }} {{ 7 // 2 }} {{ 7 % 4 }} {{ -3 | abs }}
{%- for key, value in {'x': 1, 'y': 2} | dictsort %} {{ key }}={{ value }}{% if not loop.last %},{% endif %}{% endfor %}
{% filter indent(2) %}
one
two
{% endfilter %}
{{ messages | groupby('role') | map('first') | list }} {{ [3, 1, 2] | sort | batch(2) | list }}
{{ ['b', 'a'] | sum(start='') if false else 'x' | center(5) }} {{ messages[-1].role in ['user', 'tool'] }}
"""

TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "parts": PARTS, "corners": CORNERS}

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Say what the weather is <now> & here — 'é'",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer", "enum": [1, 2]}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]

_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 1}}}

CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hello"}],
    "with a system message": [{"role": "system", "content": " Be brief.\n"}, {"role": "user", "content": "Hi\n\n"}],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 1 < 3?"},
        {"role": "assistant", "content": "  Yes & no.  "},
        {"role": "user", "content": "你好 \"quoted\" 'too' {{ not_rendered }} {% raw %}"},
    ],
    "thinking": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "<think>\nhmm\n</think>\n\nanswer"},
        {"role": "user", "content": "again"},
        {"role": "assistant", "content": "done", "reasoning_content": "\nlet me see\n"},
    ],
    "reasoning by its other name": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "done", "reasoning": "let me see"},
    ],
    "tools": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": None, "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "And now?"},
    ],
    "two calls": [
        {"role": "user", "content": "What is the weather?"},
        {"role": "assistant", "content": "I shall ask.", "tool_calls": [_CALL, _CALL]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ],
    "roles out of order": [{"role": "assistant", "content": "I begin"}, {"role": "assistant", "content": "twice"}],
}
