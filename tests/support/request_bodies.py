"""Valid bodies of requests to all endpoints, which tests change."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
CALL = {"function": {"name": "f", "arguments": {"a": True}}}
OPENAI_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": true}'}}
HELLO = [{"role": "user", "content": "hi"}]
CONVERSATION: list[dict[str, Any]] = [
    {"role": "developer", "content": [{"type": "text", "text": "be"}]},
    *HELLO,
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [OPENAI_CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "x"},
]
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "triggered_tags",
        "triggers": ["<a"],
        "tags": [
            {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</a>"}
        ],
    },
}
LEGACY_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
    "triggers": ["<a"],
}
LAZY_GRAMMAR = {
    "grammar": 'root ::= "<a>" [a-z]+ "</a>"',
    "grammar_lazy": True,
    "grammar_triggers": [{"type": "word", "value": "<a>"}, {"type": "pattern", "value": "a+b"}],
}
OTHERS: dict[str, dict[str, Any]] = {
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": true}'},
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
        ],
        "instructions": "be",
        "tools": [{"type": "function", **FUNCTION, "strict": False}],
        "tool_choice": {"type": "function", "name": "f"},
        "text": {"format": {"type": "json_object"}},
        "reasoning": {"effort": "low", "summary": "auto"},
        "include": ["message.output_text.logprobs"],
        "metadata": {"a": "b"},
        "max_output_tokens": 2,
        "top_logprobs": 1,
        "stream": False,
        "store": False,
        "temperature": 0.5,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": True}}]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x", "is_error": False}],
            },
        ],
        "system": [{"type": "text", "text": "be"}],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 3},
        "output_config": {"effort": "low"},
        "stop_sequences": ["x"],
        "max_tokens": 2,
        "top_k": 3,
        "stream": False,
    },
    "/api/chat": {
        "messages": [
            *HELLO,
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [TOOL],
        "options": {"num_predict": 2, "mirostat": 2, "stop": ["x"]},
        "think": "low",
        "logprobs": True,
        "top_logprobs": 1,
        "stream": False,
    },
    "/api/generate": {
        "prompt": "hi",
        "system": "be",
        "format": "json",
        "options": {"num_predict": 2, "repeat_penalty": 1.1},
        "stream": False,
    },
}
"""A valid body of each other API."""
SMALL: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {
        name: value for name, value in OTHERS["/v1/messages"].items() if name in ("messages", "system", "tools")
    },
    "/api/show": {"model": "nucleate-tiny"},
    "/tokenize": {"messages": CONVERSATION, "tools": [TOOL], "add_generation_prompt": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
"""A valid body of each endpoint that generates nothing."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
OPENAI: dict[str, list[dict[str, Any]]] = {
    CHAT: [
        {
            "messages": CONVERSATION,
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning_effort": "low",
            "max_reasoning_tokens": 2,
            "chat_template_kwargs": {"enable_thinking": True, "a": [{"b": 1}]},
            "max_completion_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "truncate_prompt_tokens": 20,
            "truncation_side": "left",
            "priority": 0,
        },
        {
            "messages": [*HELLO, {"role": "assistant", "content": "Well"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "add_special_tokens": False,
            "echo": True,
            "logprobs": True,
            "top_logprobs": 1,
            "prompt_logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "logit_bias": {"5": 1},
            "max_tokens": 2,
            "n": 2,
        },
        {
            "messages": HELLO,
            "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            },
            "max_tokens": 3,
        },
        {"messages": HELLO, "response_format": TAG, "max_tokens": 2, "stream": True},
        {"messages": HELLO, "response_format": LEGACY_TAG, "max_tokens": 2},
        {
            "messages": HELLO,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
            "max_tokens": 2,
        },
        {"messages": HELLO, "use_beam_search": True, "n": 2, "max_tokens": 2, "length_penalty": 1.0},
    ],
    COMPLETIONS: [
        {
            "prompt": ["Once", "Twice"],
            "echo": True,
            "logprobs": 1,
            "prompt_logprobs": 1,
            "best_of": 2,
            "n": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "max_tokens": 2,
            "stop": ["x"],
            "stop_token_ids": [7],
        },
        {
            "prompt": "Once",
            "suffix": " time",
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {"prompt": [5, 6], "truncate_prompt_tokens": 1, "truncation_side": "right", "max_tokens": 2, "priority": 0},
        {"prompt": "Once", "structured_outputs": {"structural_tag": TAG}, "max_tokens": 2},
        {"prompt": "Once", **LAZY_GRAMMAR, "max_tokens": 2},
        {"prompt": "Once", "structured_outputs": {"json_schema": SCHEMA, "whitespace": "none"}, "max_tokens": 2},
        {"prompt": "Once", "guidance_scale": 2.0, "negative_prompt": "Twice", "max_tokens": 2},
        {
            "prompt": "Once",
            "pipeline": [{"stage": "temperature", "temperature": 0.5}, {"stage": "top_k", "k": 5}],
            "max_tokens": 2,
        },
    ],
}
"""Valid bodies of OpenAI's endpoints, with the fields that go together."""
BODIES: dict[str, list[dict[str, Any]]] = {
    **OPENAI,
    **{path: [body] for path, body in {**OTHERS, **SMALL}.items()},
}
MEASURED = {
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
    CHAT: "max_tokens",
    COMPLETIONS: "max_tokens",
}
"""The field that bounds the output."""
