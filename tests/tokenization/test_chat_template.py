"""Chat templates render as in Transformers, and a hostile one is harmless."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import pytest

from nucleate.parameters.parameter import ParameterError
from nucleate.tokenization import chat_template
from nucleate.tokenization.chat_template import MAX_TEMPLATE, ChatTemplateOptions, render

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [{"role": "system", "content": "Be <b>brief</b> & kind."}, {"role": "user", "content": "Hi"}]

CHAT_ML = """
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
LLAMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{% set messages = messages[1:] %}
{% else %}{% set system = '' %}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {% endif %}
    {% if message['role'] == 'user' %}
[INST] {% if loop.first and system %}<<SYS>>{{ system }}<</SYS>>{% endif %}{{ message['content'] | trim }} [/INST]
    {%- else %}
{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}
    {%- endif %}
{% endfor %}"""


def test_common_templates() -> None:
    expected = "<|im_start|>system\nBe <b>brief</b> & kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert render(CHAT_ML, MESSAGES) == expected + "<|im_start|>assistant\n"
    more = [*MESSAGES, {"role": "tool", "content": "x"}]
    assert render(CHAT_ML, more, ChatTemplateOptions(add_generation_prompt=False)) == expected
    text = render(LLAMA, [*MESSAGES, {"role": "assistant", "content": "Yes?"}], special_tokens=TOKENS)
    assert text == "<s>[INST] <<SYS>>Be <b>brief</b> & kind.<</SYS>>Hi [/INST]Yes?</s>"


def test_transformers_renders_the_same() -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"type": "function", "function": {"name": "f", "description": "ä <>&'\""}}]
    templates = [
        CHAT_ML,
        LLAMA,
        "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}|{{ documents is none }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% for m in messages %}\n  {% if loop.last %}{% break %}{% endif %}\n{{ m.content[:3] }}\n{% endfor %}\n",
    ]
    for template in templates:
        transformers_text, _ = utilities.render_jinja_template(
            [MESSAGES], tools, None, template, add_generation_prompt=True, bos_token="<s>", eos_token="</s>"
        )
        options = ChatTemplateOptions(variables={"tools": tools})
        assert render(template, MESSAGES, options, TOKENS) == transformers_text[0]


TRIMMED = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
PARTS = "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"


@pytest.mark.parametrize("template", [CHAT_ML, TRIMMED])
@pytest.mark.parametrize("final", ["Once", "Once upon a ", "two\n", "", "Hi", "<|im_end|>"])
def test_final_messages_are_continued_as_in_transformers(template: str, final: str) -> None:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = [*MESSAGES, {"role": "assistant", "content": final}]
    expected, _ = utilities.render_jinja_template(
        [messages], None, None, template, continue_final_message=True, add_generation_prompt=False
    )
    text = render(template, messages, ChatTemplateOptions(continue_final_message=True))
    assert text == expected[0]
    assert text.rstrip().endswith(final.strip())
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": final}]}]
    assert render(PARTS, parts, ChatTemplateOptions(continue_final_message=True)) == f"<a><{final}"


@pytest.mark.parametrize(
    ("template", "content"),
    [("nothing", "a"), ("{{ messages[0].content }}", "a"), (PARTS, []), (PARTS, [{"type": "image"}])],
)
def test_final_messages_that_cannot_be_continued(template: str, content: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    with pytest.raises(ParameterError, match="continue_final_message"):
        render(template, messages, ChatTemplateOptions(continue_final_message=True))


def test_date() -> None:
    today = datetime.now().astimezone().year
    assert render("{{ strftime_now('%Y') }}", MESSAGES) in {str(today - 1), str(today)}


REJECTED = [
    ("{{ raise_exception('no system\nrole') }}", "chat template: no system role"),
    ("a\n{% if %}", "chat template: line 2: Expected an expression"),
    ("{{ messages[0].content + 1 }}", "chat template: can only concatenate str"),
    ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__'"),
    ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
    ("{{ nothing.at.all }}", "chat template: 'nothing' is undefined"),
    ("{{ 'a' * 10**9 }}", "operator * may not be used like this"),
    ("{{ 10**10**10 }}", "operator ** may not be used like this"),
    ("{{ '%1000000000d' % 1 }}", "operator % may not be used like this"),
    ("{% for i in range(100000) %}{{ 'abcdefgh' * 1000 }}{% endfor %}", "the prompt grew beyond"),
    ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    (" " * (MAX_TEMPLATE + 1), "the chat template has 1000001 characters"),
]


@pytest.mark.parametrize(("template", "message"), REJECTED, ids=[template[:20] for template, _ in REJECTED])
def test_template_errors_are_one_line(template: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        render(template, MESSAGES)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.2)
    began = time.thread_time()
    with pytest.raises(ValueError, match=r"took longer than 0\.2 s"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", MESSAGES)
    assert time.thread_time() - began < 5


BAD = [
    ([], "messages: must be a list with at least one message"),
    ("hi", "messages: must be a list"),
    ([{"role": "user", "content": "a"}, "b"], r"messages\[1\]: must be an object with role and content, not 'b'"),
    ([{"content": "a"}], r"messages\[0\]\.role: must be a non-empty string, not None"),
    ([{"role": "user"}], r"messages\[0\]\.content: must be a string or a list of parts, not None"),
    ([{"role": "user", "content": 5}], r"messages\[0\]\.content: must be a string or a list of parts, not 5"),
    ([{"role": "user", "content": [{"text": "a"}]}], r"messages\[0\]\.content\[0\]: must be an object with a type"),
]


@pytest.mark.parametrize(("messages", "message"), BAD)
def test_messages_are_checked(messages: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render(CHAT_ML, messages)


def test_other_message_formats_reach_the_template() -> None:
    call = [{"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}]
    assert render("{{ messages[0].tool_calls[0].name }}", call) == "f"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    assert render("{{ messages[0].content[0].text }}", parts) == "a"
