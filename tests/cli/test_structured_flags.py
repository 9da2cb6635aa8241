"""Structured-output flags of every command, and reports of schema keywords that cannot be enforced."""

from __future__ import annotations

import argparse
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tiers
from batch_folder import Folder, request
from grammar_examples import validated
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flags import params

import nucleate as nc
from nucleate.cli import flags
from nucleate.cli.argument_parser import Flag, UsageError
from nucleate.cli.main import COMMANDS, command_parser, main
from nucleate.cli.sampling_flags import STRUCTURED_FLAGS, add_sampling, read_values, set_parameter
from nucleate.structured_output.spec import KINDS

TAG = {"type": "structural_tag", "format": {"type": "any_text"}}
SCHEMA = {"type": "object", "properties": {"z": {"enum": ["é", 1]}, "a": {"type": "null"}}, "required": ["z", "a"]}
TRIGGERS = [{"type": "word", "value": "<a:"}, {"type": "token", "value": "x"}]
GENERATE = ("generate", "Once upon a time", "--max-tokens", "60", "--seed", "1")


def constraint(*arguments: str) -> nc.StructuredOutputs | None:
    return params(*arguments).structured_outputs


@pytest.mark.parametrize("others", [(), ("--json-object",), ("--choice", "a")])
def test_whitespace_is_the_default_of_an_engine(others: tuple[str, ...], llm: nc.LLM) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    flags.add_model(parser, engine=True)
    add_sampling(parser)
    arguments = parser.parse_args(["--json-whitespace", "none", *others])
    assert flags.engine_options(arguments)["json_whitespace"] == "none"
    assert read_values(arguments).keys() == ({"structured_outputs"} if others else set())
    assert "json_whitespace" not in flags.engine_options(parser.parse_args([]))
    wrong = flags.engine_options(parser.parse_args(["--json-whitespace", "x"]))
    with pytest.raises(nc.ParameterError, match="json_whitespace must be one of flexible, none, got 'x'"):
        llm.new_engine(**wrong)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), None),
        (("--json-schema", json.dumps(SCHEMA)), {"json_schema": SCHEMA}),
        (("--json-schema", " {} "), {"json_schema": {}}),
        (("--json-object",), {"json_object": True}),
        (("--regex", "@[a-z]+"), {"regex": "@[a-z]+"}),
        (("--regex=-[0-9]",), {"regex": "-[0-9]"}),
        (("--choice", "yes"), {"choice": ("yes",)}),
        (("--choice", "b,c", "--choice", "@a", "--choice", "b,c"), {"choice": ("b,c", "@a", "b,c")}),
        (("--grammar", 'start: "a" start | "b"'), {"grammar": 'start: "a" start | "b"'}),
        (("--json-object", "--json-whitespace", "none"), {"json_object": True, "whitespace": "none"}),
        (("--json-object", "--json-max-digits", "5"), {"json_object": True, "max_digits": 5}),
        (("--structural-tag", json.dumps(TAG)), {"structural_tag": TAG}),
        (
            ("--grammar", "a", "--grammar-lazy", "--grammar-trigger", "word:<a:", "--grammar-trigger=token:x"),
            {"grammar": "a", "grammar_lazy": True, "grammar_triggers": TRIGGERS},
        ),
        (
            ("--schema-on-unsupported", "approximate", "--json-schema", "{}"),
            {"json_schema": {}, "on_unsupported": "approximate"},
        ),
    ],
)
def test_every_flag_has_a_field(arguments: tuple[str, ...], expected: dict[str, Any] | None) -> None:
    assert constraint(*arguments) == (None if expected is None else nc.StructuredOutputs(**expected))


def test_every_field_has_its_flag() -> None:
    assert list(STRUCTURED_FLAGS) == list(nc.StructuredOutputs.__dataclass_fields__)
    assert set(KINDS) < set(STRUCTURED_FLAGS)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_file_is_named_after_an_at_sign(tmp_path: Path, encoding: str) -> None:
    schema, grammar = tmp_path / "a schema.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA, ensure_ascii=False, indent=2), encoding)
    grammar.write_text('start: "é"\r\n  | "x"\n', encoding, newline="")
    made = constraint("--json-schema", f"@{schema}")
    assert made == nc.StructuredOutputs(json_schema=SCHEMA)
    assert list(made.schema["properties"]) == ["z", "a"]
    assert constraint("--grammar", f"@{grammar}") == nc.StructuredOutputs(grammar='start: "é"\r\n  | "x"\n')


def test_an_unknown_type_of_trigger_is_a_usage_error() -> None:
    for trigger in ("words:a", "a", ":a"):
        with pytest.raises(UsageError, match="--grammar-trigger must be TYPE:VALUE"):
            constraint("--grammar", 'root ::= "a"', "--grammar-lazy", "--grammar-trigger", trigger)


@pytest.mark.parametrize("flag", ["--json-schema", "--grammar"])
def test_files_that_cannot_be_read_are_errors(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "schema"
    with pytest.raises(FileNotFoundError):
        constraint(flag, f"@{file}")
    file.write_bytes(b"{}\xff")
    with pytest.raises(UsageError, match=r"schema is not UTF-8: invalid start byte at byte 2"):
        constraint(flag, f"@{file}")
    with pytest.raises(UsageError, match=rf"{flag} {file} is a file name; use {flag} @{file} to read the file"):
        constraint(flag, str(file))
    file.write_bytes(b"")
    with pytest.raises(nc.ParameterError):
        constraint(flag, f"@{file}")


@pytest.mark.parametrize("text", ["x" * 5000, "a\nb", "{" + "[" * 90_000])
def test_a_text_that_cannot_be_a_path_is_a_text(text: str) -> None:
    assert constraint("--grammar", text) == nc.StructuredOutputs(grammar=text)
    with pytest.raises(nc.ParameterError, match="json_schema must be JSON"):
        constraint("--json-schema", text)


def test_wrong_values_are_errors_that_name_the_field() -> None:
    with pytest.raises(nc.ParameterError, match=r"must have exactly one of .*; got regex and choice") as caught:
        params("--regex", "a", "--choice", "b")
    assert caught.value.field == "choice"


SAMPLING = ("generate", "chat", "serve", "batch", "inspect")


@pytest.mark.parametrize("command", COMMANDS)
def test_sampling_commands_have_the_structured_output_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help-all" if command in SAMPLING else "--help"])
    captured = capsys.readouterr().out
    samples = command in SAMPLING
    for flag in STRUCTURED_FLAGS.values():
        assert (re.search(rf"^  {flag.names[0]}\b", captured, re.MULTILINE) is not None) == samples, flag.names
    parser = command_parser(command)  # would raise if two flags had the same name
    if samples:
        subject = ["in", "out"] if command == "batch" else []
        assert read_values(parser.parse_args([*subject, "--regex", "a"])) == {
            "structured_outputs": nc.StructuredOutputs(regex="a")
        }
        assert read_values(parser.parse_args(subject)) == {}


# ---- /set


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", None),
        ("None", None),
        ('{"regex": "[0-9]+"}', {"regex": "[0-9]+"}),
        ('{"json_object": true, "max_digits": 3}', {"json_object": True, "max_digits": 3}),
        ('{"choice": ["a b", "c"]}', {"choice": ("a b", "c")}),
    ],
)
def test_set_takes_json(text: str, expected: dict[str, Any] | None) -> None:
    before = nc.SamplingParams(structured_outputs={"regex": "x"}, top_k=3)
    after = set_parameter(before, "structured_outputs", text)
    assert after == before.replace(structured_outputs=expected)
    assert after.structured_outputs == (None if expected is None else nc.StructuredOutputs(**expected))


@pytest.mark.parametrize(
    ("text", "field", "words"),
    [
        ("[0-9]+", "structured_outputs", "structured_outputs must be JSON"),
        ("5", "structured_outputs", "structured_outputs must be a JSON object, got 5"),
        ("{}", "structured_outputs", "structured_outputs must have exactly one of"),
        ('{"regexp": "a"}', "regexp", "unknown field 'regexp'; did you mean regex"),
        ('{"regex": 5}', "regex", "regex must be a non-empty string, got 5"),
        ('{"regex": "a", "regex": "b"}', "structured_outputs", "duplicate name 'regex'"),
    ],
)
def test_set_rejects_an_invalid_constraint(text: str, field: str, words: str) -> None:
    with pytest.raises(nc.ParameterError, match=re.escape(words)) as caught:
        set_parameter(nc.SamplingParams(), "structured_outputs", text)
    assert caught.value.field == field


def test_a_terminal_chat_with_structured_output(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    lines = ['/set structured_outputs {"regex": "[0-9]{4}"}', "How many?", '/set structured_outputs {"regex": "("}']
    lines += ["What now?", "/set structured_outputs", "Yes?", "/set structured_outputs none", "/show"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    done = run("chat --choice perhaps --seed 1")
    assert re.match(r"[0-9]{4}\n.*\nmodel ", done.out), done.out
    assert "nucleate: regex: " in done.err
    assert "structured_outputs=None" in done.out


# ---- generate


def test_generate_with_structured_output(run: Any) -> None:
    done = run(*GENERATE, "--regex", "[0-9]{3}", "--n", "2")
    assert re.fullmatch(
        r"--- completion 1 of 2, seed 1\n[0-9]{3}\n\n--- completion 2 of 2, seed 2\n[0-9]{3}\n", done.out
    )
    assert re.fullmatch(r"\[\d+ tokens, \d+ tokens/s on .*, seed 1, stop\]\n", done.err)


def test_json_has_validation_only_for_ignored_keywords(run: Any) -> None:
    arguments = ("--json-schema", json.dumps(SCHEMA | {"additionalProperties": False}))
    captured = json.loads(run(*GENERATE, *arguments, "--json-whitespace", "none", "--json").out)
    [output] = captured["outputs"]
    assert output["text"] in ('{"z":"é","a":null}', '{"z":1,"a":null}')
    assert output["finish_reason"] == "stop"
    assert "validation" not in output
    assert nc.SamplingParams(**captured["params"]) == params(
        *GENERATE[2:], *arguments, "--json-whitespace", "none"
    ).replace(**{name: captured["params"][name] for name in ("temperature", "top_k", "top_p")})


@pytest.mark.slow
def test_ignored_keywords_are_reported_under_lenient(run: Any) -> None:
    arguments = (*GENERATE, "--json-schema", json.dumps(validated(3)), "--schema-on-unsupported", "ignore")
    *_, last = run(*arguments).err.splitlines()
    assert last.startswith("nucleate: ignored schema keywords: uniqueItems; the output is invalid: $: [")
    assert last.endswith("has non-unique elements")
    *_, first, second = run(*arguments, "--n", "2").err.splitlines()
    assert first.startswith("nucleate: completion 1: ignored schema keywords: uniqueItems; the output is invalid: ")
    assert second.startswith("nucleate: completion 2: ignored schema keywords: uniqueItems; the output is invalid: ")
    [output] = json.loads(run(*arguments, "--json").out)["outputs"]
    assert output["validation"]["ignored"] == ["uniqueItems"]
    assert len(output["validation"]["errors"]) == 1
    few = {"type": "integer", "minimum": 2, "maximum": 3}
    one = validated(2) | {"prefixItems": [few | {"multipleOf": 2}, few | {"multipleOf": 3}]}
    assert run(*GENERATE, "--json-schema", json.dumps(one), "--schema-on-unsupported", "ignore").err.endswith(
        "ignored schema keywords: uniqueItems; the output is valid\n"
    )


# ---- inspect


def test_inspect_shows_the_mask(llm: nc.LLM, run: Any) -> None:
    captured = json.loads(run("inspect 'Once upon a time' --regex [0-9]+ --top-k 3 --seed 1 --json").out)
    steps = {step["stage"]: step for step in captured["steps"]}
    texts = {token: llm.tokenizer.decode([token], False) for token in range(llm.model.vocab_size)}
    digits = [token for token, text in texts.items() if re.fullmatch("[0-9]+", text)]
    assert steps["mask"]["left"] == len(digits) >= 10
    assert {token for token, _, _ in steps["mask"]["top"]} == set(digits)
    assert steps["top_k"]["left"] == 3
    assert captured["token_id"] in digits
    shown = run("inspect 'Once upon a time' --regex [0-9]+ --seed 1").out
    assert f"masked tokens: {llm.model.vocab_size - len(digits)} banned" in shown
    assert "removed: mask" in shown


def test_inspect_allows_the_end_only_where_the_grammar_does(llm: nc.LLM, run: Any) -> None:
    end = min(llm.tokenizer.eos_token_ids)
    found = []
    for more in ((), ("--ignore-eos",)):
        page = json.loads(run("inspect Once --regex '(yes)?' --json --top 99", *more).out)
        steps = {step["stage"]: step for step in page["steps"]}
        found.append(end in [token for token, _, _ in steps["mask"]["top"]])
    assert found == [True, False]


def test_inspect_has_no_mask_without_structured_output(run: Any) -> None:
    assert "mask" not in [step["stage"] for step in json.loads(run("inspect 'Once upon a time' --json").out)["steps"]]
    assert run("inspect 'Once upon a time' --regex '('", status=2).err.startswith("nucleate: regex: ")


# ---- batch


def test_batch_lines_with_structured_output(folder: Folder) -> None:
    lenient = {"json_schema": validated(3), "on_unsupported": "ignore"}
    schema = {"type": "json_schema", "json_schema": {"name": "few", "schema": validated(3), "strict": False}}
    folder.write(
        {"prompt": "The fox", "structured_outputs": {"regex": "[0-9]{5}"}},
        request("a", structured_outputs={"regex": "[0-9]{5}"}),
        request("b", "/v1/chat/completions", structured_outputs={"choice": ["fox", "dog"]}),
        {"prompt": "The fox", "structured_outputs": lenient},
        request("c", "/v1/chat/completions", response_format=schema),
    )
    status, records, _ = folder.run()
    assert status == 0
    plain, completion, chat, prompt_record, formatted = records
    assert re.fullmatch("[0-9]{5}", plain["text"])
    assert "validation" not in plain
    assert re.fullmatch("[0-9]{5}", completion["response"]["body"]["choices"][0]["text"])
    assert chat["response"]["body"]["choices"][0]["message"]["content"] in ("fox", "dog")
    [choice] = formatted["response"]["body"]["choices"]
    assert all(set(json.loads(text)) <= {1, 2} for text in (prompt_record["text"], choice["message"]["content"]))
    for found in (prompt_record, choice):
        assert found["validation"]["ignored"] == ["uniqueItems"]
        assert len(found["validation"]["errors"]) == 1


def test_constraint_flags_are_the_defaults_of_lines(folder: Folder) -> None:
    folder.write("The fox", {"prompt": "The fox", "structured_outputs": {"choice": ["dog"]}})
    status, records, err = folder.run("--regex", "(")  # an error before the first line
    assert (status, records, err.startswith("nucleate: regex: ")) == (2, [], True)
    status, records, _ = folder.run("--choice", "fox")
    assert (status, [record["text"] for record in records]) == (0, ["fox", "dog"])


# ---- any text


@settings(max_examples=tiers.count(50, 200), deadline=None)
@given(st.sampled_from([*STRUCTURED_FLAGS.values()]), st.text(st.characters(exclude_characters="\0"), max_size=30))
def test_any_text_is_a_constraint_or_an_error(flag: Flag, text: str) -> None:
    try:
        made = constraint(f"{flag.names[0]}={text}" if "metavar" in flag.options else flag.names[0])
    except (nc.ParameterError, UsageError, OSError):
        return
    assert made is not None
    assert made == nc.StructuredOutputs.from_json(made.to_json())


def test_a_large_number_of_digits_is_an_error_and_not_cut(run: Any) -> None:
    assert "max_digits must be" in run(*GENERATE, "--json-object", "--json-max-digits", "1" * 5000, status=2).err
