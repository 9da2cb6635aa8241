"""Messages for chat templates: calls, results, roles and reasoning."""

from __future__ import annotations

from typing import Any

import pytest

import nucleate as nc
from nucleate.chat.chat_format import TOOL_FORMATS, ChatFormat, template_messages
from nucleate.chat.tools import ToolUse
from nucleate.tokenization.chat_template import ChatTemplateOptions

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASSISTANT = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "5"}
TOOLS = [nc.Tool("f", "Do.")]


def made(messages: list[Any], name: str | None = "hermes", template: str = "", tools: Any = ()) -> list[Any]:
    return template_messages(messages, template, None if name is None else TOOL_FORMATS[name], tools)


def test_arguments_become_objects_and_null_content_stays() -> None:
    _, assistant, result = made([USER, ASSISTANT, RESULT])
    assert assistant["content"] is None
    assert assistant["tool_calls"] == [{**CALL, "function": {"name": "f", "arguments": {"a": 1}}}]
    assert result == RESULT
    again = made([USER, assistant, result])
    assert again[1] == assistant
    assert ASSISTANT["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'  # type: ignore[index]  # unchanged


def test_deepseek_templates_get_arguments_as_text() -> None:
    for given in ('{"a":1}', {"a": 1}):
        call = {"id": "1", "function": {"name": "f", "arguments": given}}
        _, assistant = made([USER, {**ASSISTANT, "tool_calls": [call]}], "deepseek_v31")
        assert assistant["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'


def test_mistral_templates_get_ids_of_nine_characters() -> None:
    _, assistant, result = made([USER, ASSISTANT, RESULT], "mistral")
    identifier = assistant["tool_calls"][0]["id"]
    assert len(identifier) == 9
    assert identifier.isalnum()
    assert result["tool_call_id"] == identifier
    assert made([{**RESULT, "tool_call_id": "abcdEFGH1"}], "mistral")[0]["tool_call_id"] == "abcdEFGH1"


def test_the_role_developer_becomes_system_unless_the_template_has_it() -> None:
    developer = {"role": "developer", "content": "Be brief."}
    assert made([developer])[0]["role"] == "system"
    assert made([developer], template="developer")[0] == developer


def test_parts_of_results_are_joined() -> None:
    parts = [{"type": "text", "text": "a", "x": 1}, {"type": "text", "text": "b"}]
    assert made([{**RESULT, "content": parts}])[0]["content"] == "ab"


def test_reasoning_is_passed_under_the_names_of_templates() -> None:
    for name in ("reasoning_content", "reasoning"):
        (message,) = made([{"role": "assistant", "content": "x", name: "hm"}])
        assert (message["reasoning_content"], message["thinking"]) == ("hm", "hm")


@pytest.mark.parametrize("name", ["plain", None])
def test_without_tools_in_the_template_all_becomes_text(name: str | None) -> None:
    second = {**CALL, "id": "call_2", "function": {"name": "g", "arguments": {}}}
    messages = [
        {"role": "system", "content": "Be brief."},
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, second]},
        RESULT,
        {"role": "tool", "tool_call_id": "call_2", "content": "6"},
    ]
    system, _, assistant, results = made(messages, name, tools=TOOLS)
    assert system["content"].startswith("Be brief.\n\nYou can call these tools")
    assert '{"name": "f", "description": "Do.", "parameters"' in system["content"]
    assert assistant == {
        "role": "assistant",
        "content": 'Wait.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    }
    assert results == {"role": "user", "content": "Result of f:\n5\n\nResult of g:\n6"}
    assert made([USER], name, tools=TOOLS)[0]["role"] == "system"
    assert made([USER], name) == [USER]


@pytest.mark.parametrize(
    ("calls", "place"),
    [
        (5, "messages[0].tool_calls must be a list"),
        ([5], "messages[0].tool_calls[0]"),
        ([{"function": {}}], "messages[0].tool_calls[0]"),
        ([{"function": {"name": "f", "arguments": "{"}}], "messages[0].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": "[1]"}}], "messages[0].tool_calls[0].function.arguments"),
        ([{"function": {"name": "f", "arguments": 5}}], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_invalid_calls_are_named(calls: Any, place: str) -> None:
    with pytest.raises(nc.ParameterError) as caught:
        made([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert caught.value.field == "messages"
    assert place in str(caught.value)


def test_a_template_sees_tools_and_calls(llm: nc.LLM) -> None:
    template = (
        "{% for t in tools %}{{ t.function.name }}{% endfor %}<tool_call>"
        "{% for m in messages %}|{{ m.role }}:{% for c in m.tool_calls %}{{ c.function.arguments.a }}{% endfor %}"
        "{{ m.content }}{% endfor %}{{ reasoning_effort }}"
    )
    chat_format = ChatFormat(llm.tokenizer, TOOL_FORMATS["hermes"], None)
    options = ChatTemplateOptions(variables={"reasoning_effort": "low"})
    chat = chat_format.render([USER, ASSISTANT, RESULT], ToolUse.read(TOOLS), options, template)
    assert chat.text == "f<tool_call>|user:Hi|assistant:1None|tool:5low"
