"""Chat templates that are given by name or as a file, and where their answers end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import chat_models
import pytest
from tokenizers.processors import ByteLevel

import nucleate as nc
from nucleate.cli.main import main
from nucleate.server.http_errors import http_error
from nucleate.tokenization.chat_template import NAMED_TEMPLATES, find_template, render, turn_ends

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": " Yes? "},
    {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]},
]
PROMPTS = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    "<|im_start|>assistant\n Yes? <|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma": "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
    "mistral": "[INST] Be brief.\n\nHi[/INST] Yes?</s>[INST] Why?[/INST]",
    "plain": "Be brief.\n\nUser:\nHi\n\nAssistant:\nYes?\n\nUser:\nWhy?\n\nAssistant:\n",
}
ENDS = {
    "chatml": ("<|im_end|>", "<|im_start|>"),
    "llama3": ("<|eot_id|>", "<|start_header_id|>"),
    "gemma": ("<end_of_turn>", "<start_of_turn>"),
    "mistral": ("</s>", "[INST]"),
    "plain": ("\n\nUser:", "\nUser:", "\n\nAssistant:", "\nAssistant:"),
}


@pytest.fixture(scope="module")
def llm() -> nc.LLM:
    """The embedded model, which the tests give other templates."""
    return nc.LLM()


def test_every_name_has_a_prompt_and_an_end(llm: nc.LLM) -> None:
    assert NAMED_TEMPLATES.keys() == PROMPTS.keys() == ENDS.keys()
    for name, expected in PROMPTS.items():
        template = find_template(name, llm.tokenizer)
        assert render(template, CHAT, special_tokens=llm.tokenizer.special_tokens) == f"<|endoftext|>{expected}"
        assert turn_ends(template, llm.tokenizer.special_tokens) == ENDS[name]
        assert "Be brief." in render(template, CHAT[:1])  # a system message alone is not lost
        with pytest.raises(nc.ParameterError, match="roles of this format are system, user and assistant, not boss"):
            render(template, [{"role": "boss", "content": "Hi"}])


def test_the_prompt_begins_with_bos_only_where_the_tokenizer_adds_one() -> None:
    tokenizer = nc.LLM().tokenizer
    tokenizer.backend.post_processor = ByteLevel()
    text = render(find_template("chatml", tokenizer), CHAT[1:2], special_tokens=tokenizer.special_tokens)
    assert text.startswith("<|im_start|>user\nHi")


@pytest.mark.parametrize(
    ("name", "text", "shown"),
    [
        ("chatml", r"Good<\|im_end\|>\nmore", "Good"),
        ("chatml", r"Good<\|im_start\|>user\n", "Good"),
        ("gemma", "Good<end_of_turn>x", "Good"),
        ("llama3", r"Good\n<\|eot_id\|>x", "Good\n"),
        ("mistral", "Good</s>x", "Good"),
        ("plain", r"Good day\n\nUser:\nHi", "Good day"),
        ("plain", r"Good day\nUser:\nHi", "Good day"),
        ("plain", r"Good day\n\nAssistant:\nHi", "Good day"),
        ("plain", r"User: no\n\nUser:", "User: no"),
    ],
)
def test_an_answer_ends_where_its_format_says(llm: nc.LLM, name: str, text: str, shown: str) -> None:
    """No marker is a special token here. The reason is that of EOS: no stop string of the request."""
    llm.use_chat_template(name)
    values: dict[str, Any] = {"structured_outputs": {"regex": text}, "max_tokens": 60, "temperature": 0}
    output = llm.chat(CHAT, **values).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == (shown, "stop", None)
    assert llm.chat(CHAT, **values, stop=[shown[-2:]]).outputs[0].stop_reason == shown[-2:]
    streamed = "".join(chunk.text for chunk in llm.stream_chat(CHAT, **values))
    assert streamed == shown


def test_a_request_keeps_its_stop_strings_and_ignore_eos(llm: nc.LLM) -> None:
    llm.use_chat_template("plain")
    values: dict[str, Any] = {"structured_outputs": {"regex": r"One\nUser: two"}, "max_tokens": 40, "temperature": 0}
    assert llm.chat(CHAT, **values, stop=["\nUser:"]).outputs[0].stop_reason == "\nUser:"
    assert llm.chat(CHAT, **values, include_stop_str_in_output=True).outputs[0].text == "One\nUser:"
    assert llm.chat(CHAT, **values, ignore_eos=True).outputs[0].text.startswith("One\nUser: two")
    assert llm.generate("x", **values)[0].outputs[0].text == "One\nUser: two"  # no chat


def test_speculation_and_several_outputs_end_there_too(llm: nc.LLM) -> None:
    llm.use_chat_template("plain")
    drafting = nc.LLM(speculative_config="ngram", chat_template="plain")
    values: dict[str, Any] = {"max_tokens": 60, "seed": 3, "n": 3, "temperature": 0.9}
    texts = [output.text for output in llm.chat(CHAT, **values).outputs]
    assert [output.text for output in drafting.chat(CHAT, **values).outputs] == texts
    values |= {"structured_outputs": {"regex": r"(One two three\. ){4}\n\nUser:\nx"}, "n": 1}
    assert drafting.chat(CHAT, **values).outputs[0].text == "One two three. " * 4


def test_an_end_that_is_a_special_token_counts_as_eos(llm: nc.LLM, tmp_path: Path) -> None:
    file = tmp_path / "user.jinja"
    file.write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}<|assistant|>")
    llm.use_chat_template(file)
    assert llm.chat_format.turn_ends == ("<|user|>",)
    user = llm.tokenizer.find_token("<|user|>")
    values: dict[str, Any] = {"logit_bias": {user: 100.0}, "max_tokens": 5, "temperature": 0}
    output = llm.chat(CHAT[1:2], **values).outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason, list(output.token_ids)) == ("", "stop", None, [user])
    assert llm.chat(CHAT[1:2], **values, ignore_eos=True).outputs[0].finish_reason == "length"
    assert llm.chat(CHAT[1:2], **values, stop=["<|user|>"]).outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", ()),
        ("{% for m in messages %}{{ m.content }}. {% endfor %}", ()),
        ("{{ messages[-1].content }}", ()),
        ("{{ raise_exception('no') }}", ()),
        ("{% for m in messages %}{{ m.role | upper }}: {{ m.content }} {% endfor %}", (" USER:",)),
        (
            "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}### assistant\n",
            ("\n\n### user", "\n### user", "\n\n### assistant", "\n### assistant"),
        ),
        ("{% for m in messages %}<a>{{ m.content }}<b>{% endfor %}", ("<b>", "<a>")),
    ],
)
def test_the_end_of_other_templates(template: str, ends: tuple[str, ...]) -> None:
    assert turn_ends(template) == ends


def test_the_messages_of_harmony_do_not_end_an_answer(tmp_path: Path) -> None:
    file = tmp_path / "harmony.jinja"
    file.write_text("{% for m in messages %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}")
    assert nc.LLM(chat_template=file).chat_format.turn_ends == ()


def test_a_wrong_template_is_an_error_that_names_what_is_allowed(tmp_path: Path) -> None:
    broken, binary = tmp_path / "broken.jinja", tmp_path / "binary.jinja"
    broken.write_text("{% for m in messages %}")
    binary.write_bytes(b"\xff\xfe\x00")
    for given, words in {
        "chatmal": "chat_template must be chatml, .*, plain or a Jinja file, got 'chatmal' .*did you mean chatml",
        str(tmp_path): "Is a directory",
        str(binary): "not a text in UTF-8",
        str(broken): "broken.jinja: line 1: ",
        "\0": "or a Jinja file",
    }.items():
        with pytest.raises(nc.ParameterError, match=words) as caught:
            nc.LLM(chat_template=given)
        assert caught.value.field == "chat_template"
    for number in (3, ["plain"], {}):
        with pytest.raises(nc.ParameterError, match="chat_template must be chatml"):
            nc.LLM(chat_template=number)  # type: ignore[arg-type]


def test_a_model_without_a_template_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = chat_models.folder(tmp_path, "")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    bare = nc.LLM(folder)
    with pytest.raises(
        nc.ModelError, match=r"no chat template; set chat_template \(--chat-template\) to chatml, "
    ) as e:
        bare.chat(CHAT)
    error = http_error(e.value)
    assert error is not None
    assert (error.status, error.code) == (400, "no_chat_template")
    assert "--chat-template" in error.message
    assert "plain or a Jinja file" in error.message
    assert main(["generate", "Hi", "-m", str(folder), "--chat-template", "plain", "--max-tokens", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"].endswith("\n\nUser:\nHi\n\nAssistant:\n")
    assert main(["generate", "Hi", "-m", str(folder), "--chat-template", "plain", "--num-beams", "2"]) == 2
    assert "--chat-template cannot be combined with --num-beams" in capsys.readouterr().err


def test_commands_without_conversations_reject_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "Hi", "--chat-template", "plain"]) == 2
    assert "--chat-template needs --web" in capsys.readouterr().err
    assert main(["compare", "--chat-template", "plain"]) == 2
    assert "unrecognized arguments: --chat-template" in capsys.readouterr().err
