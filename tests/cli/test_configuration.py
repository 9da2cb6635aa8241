"""Flags from a configuration file and from environment variables: precedence, values of all kinds, errors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from nucleate.cli import flags
from nucleate.cli.argument_parser import Configuration, UsageError
from nucleate.cli.main import command_parser
from nucleate.cli.sampling_flags import read_values

PLUGIN = """
from nucleate.sampling.stage import Scale, param

class Tilt(Scale):
    \"\"\"Multiply all scores.\"\"\"
    rank = 45
    by: float = param("Factor of all scores", neutral=1.0, name="tilt_by", low=0.0, open_low=True)

    def apply(self, x, row):
        return x * self.by
"""


def parse(tmp_path: Path, text: str = "", *arguments: str, **variables: str) -> argparse.Namespace:
    file = tmp_path / "server.yaml"
    file.write_text(text, "utf-8")
    words = ["--config", str(file), *arguments]
    environment = {f"NUCLEATE_{name}": value for name, value in variables.items()}
    return Configuration(words, environment).parse(command_parser("serve"), words)


def error(tmp_path: Path, text: str = "", **variables: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(tmp_path, text, **variables)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(tmp_path / "server.yaml"), "FILE")


def test_without_any_settings_the_defaults_apply(tmp_path: Path) -> None:
    plain = command_parser("serve").parse_args([])
    found = parse(tmp_path)
    assert {**vars(found), "config": None} == vars(plain)
    assert vars(Configuration([], {}).parse(command_parser("serve"), [])) == vars(plain)


def test_the_command_line_comes_before_variables_before_the_file_before_defaults(tmp_path: Path) -> None:
    text = "port: 1\nmax-num-seqs: 2\nlog-level: debug\ndtype: float16\n"
    found = parse(tmp_path, text, "--port", "3", PORT="4", MAX_NUM_SEQS="5")
    assert (found.port, found.max_num_seqs, found.log_level, found.dtype) == (3, 5, "debug", "float16")
    assert found.host == "127.0.0.1"


@pytest.mark.parametrize("layers", [("file",), ("variable",), ("file", "variable"), ("file", "variable", "line")])
def test_a_list_replaces_those_of_lower_precedence(tmp_path: Path, layers: tuple[str, ...]) -> None:
    text = "allow-origin: [a, b]\n" if "file" in layers else ""
    variables = {"ALLOW_ORIGIN": '["c", d]'} if "variable" in layers else {}
    line = ("--allow-origin", "e") if "line" in layers else ()
    expected = {"file": ["a", "b"], "variable": ["c", "d"], "line": ["e"]}[layers[-1]]
    assert parse(tmp_path, text, *line, **variables).allow_origin == expected
    assert command_parser("serve").parse_args([]).allow_origin == []  # the default is not shared


def test_values_stay_as_they_are_written(tmp_path: Path) -> None:
    text = (
        "served-model-name: no\nrevision: 2024-01-01\nmodel: '0123'\nmax_num_seqs: 0064\nhost: null\n"
        "stop: [yes, 'null', ' x']\ntemperature: 1e-1\nstop-token-ids: [1, 2]\nlogit-bias: {5: 1.5, 6: -1}\n"
        "order: [temperature, top_p]\npipeline: ['temperature(0.5)', top_k(3)]\n"
    )
    found = parse(tmp_path, text)
    assert flags.model_names(found)[0] == "no"
    assert (found.revision, found.model, found.max_num_seqs, found.host) == ("2024-01-01", "0123", 64, "127.0.0.1")
    values = read_values(found)
    assert values["stop"] == ("yes", "null", " x")
    assert values["temperature"] == 0.1
    assert values["stop_token_ids"] == (1, 2)
    assert dict(values["logit_bias"]) == {5: 1.5, 6: -1.0}
    assert values["order"] == ("temperature", "top_p")
    assert len(values["pipeline"]) == 2


@pytest.mark.parametrize(("text", "expected"), [("true", True), ("Yes", True), ("off", False), ("0", False)])
def test_switches(tmp_path: Path, text: str, expected: bool) -> None:
    assert parse(tmp_path, f"log-prompts: {text}").log_prompts is expected
    assert parse(tmp_path, LOG_PROMPTS=text).log_prompts is expected
    assert parse(tmp_path, f"no-skip-special-tokens: {text}").param_skip_special_tokens is (False if expected else None)


def test_a_variable_can_turn_a_switch_of_the_file_off(tmp_path: Path) -> None:
    assert parse(tmp_path, "log-prompts: true", LOG_PROMPTS="false").log_prompts is False
    assert parse(tmp_path, "log-prompts: false", "--log-prompts").log_prompts is True


def test_the_file_can_be_named_by_a_variable(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("port: 7\n")
    environment = {"NUCLEATE_CONFIG": str(tmp_path / "a.yaml")}
    assert Configuration([], environment).parse(command_parser("serve"), []).port == 7
    assert Configuration(["--config="], environment).parse(command_parser("serve"), []).port == 8000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 1", "FILE: unknown key 'max-num-seq'; did you mean 'max-num-seqs'?"),
        ("max_new_tokens: 1", "FILE: unknown key 'max_new_tokens'; did you mean 'max-tokens'?"),
        ("xyzzy: 1", "FILE: unknown key 'xyzzy' (keys are the names of flags, see --help-all)"),
        ("config: a.yaml", "FILE: 'config' can only be set on the command line"),
        ("help: true", "FILE: 'help' can only be set on the command line"),
        ("debug: true", "FILE: 'debug' can only be set on the command line"),
        ("port: x", "FILE: port: argument --port: invalid int value: 'x' (see nucleate serve --help)"),
        ("log-format: xml", "FILE: log-format: argument --log-format: invalid choice: 'xml'"),
        ("log-prompts: maybe", "FILE: log-prompts must be true or false, got 'maybe'"),
        ("log-prompts: [true]", "FILE: log-prompts must be true or false"),
        ("port: [1, 2]", "FILE: port must be one value, got a list"),
        ("port: {a: 1}", "FILE: port must be one value, got a mapping"),
        ("allow-origin: {a: 1}", "FILE: allow-origin must be one value, got a mapping"),
        ("stop-token-ids: [[1]]", "FILE: stop-token-ids must be one value, got a list"),
        ("port: 1\nport: 2", "FILE is not valid YAML: line 2: duplicate key 'port'"),
        ("max-num-seqs: 1\nmax_num_seqs: 2", "FILE: max-num-seqs and max_num_seqs are the same setting"),
        ("temp: 1\ntemperature: 2", "FILE: temp and temperature are the same setting"),
        ("- a", "FILE must be a YAML mapping"),
        ("just text", "FILE must be a YAML mapping"),
        ("port: [1", "FILE is not valid YAML: "),
        ("a: &x 1\nb: *x", "FILE is not valid YAML: line 2: aliases are not supported"),
        ("<<: {port: 1}", "FILE: unknown key '<<'"),
        ("? [a]\n: 1", "FILE is not valid YAML: "),
        ("[" * 3000, "FILE is not valid YAML: "),
        ("port: \x00", "FILE is not valid YAML: "),
        ("!!python/object/apply:os.system ['true']", "FILE must be a YAML mapping"),
        ("1: 2", "FILE: unknown key '1'"),
    ],
)
def test_invalid_files(tmp_path: Path, text: str, message: str) -> None:
    assert error(tmp_path, text).startswith(message)


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff")
    (tmp_path / "large.yaml").write_bytes(b"#" * (2**20 + 1))
    for name, message in {
        "none.yaml": "cannot be read: No such file",
        "latin.yaml": "is not UTF-8",
        "large.yaml": "has 1048577 bytes",
        "": "cannot be read: Is a directory",
    }.items():
        with pytest.raises(UsageError, match=message):
            Configuration(["--config", f"{tmp_path}/{name}"], {})


def test_misspelled_variables(tmp_path: Path) -> None:
    message = error(tmp_path, MAX_NUM_SEQ="1")
    assert message == "unknown environment variable NUCLEATE_MAX_NUM_SEQ; did you mean NUCLEATE_MAX_NUM_SEQS?"
    assert error(tmp_path, PLUGIN="x").endswith("did you mean NUCLEATE_PLUGINS?")
    assert error(tmp_path, PORT="x").startswith("NUCLEATE_PORT: argument --port: invalid int value")
    assert error(tmp_path, ALLOW_ORIGIN="[a").startswith("NUCLEATE_ALLOW_ORIGIN is not valid YAML")
    assert error(tmp_path, LOG_PROMPTS="").startswith("NUCLEATE_LOG_PROMPTS must be true or false")


def test_variables_of_others_are_left_alone(tmp_path: Path) -> None:
    kubernetes = {**dict.fromkeys(("PORT", "PORT_8000_TCP"), "tcp://10.0.0.1:8000"), "SERVICE_HOST": "10.0.0.1"}
    kubernetes |= dict.fromkeys(("PORT_8000_TCP_PORT", "SERVICE_PORT"), "8000")
    own = {"THREADS": "2", "CACHE": "/x", "API_KEYS": "a,b", "PLUGINS": "x", "WATERMARK_KEY_FILE": "k"}
    found = parse(tmp_path, **kubernetes, **own)
    assert {**vars(found), "config": None} == vars(command_parser("serve").parse_args([]))


@pytest.mark.usefixtures("registry")
def test_a_plugin_of_the_file_has_keys(tmp_path: Path, run: Any) -> None:
    (tmp_path / "tilt.py").write_text(PLUGIN)
    file = tmp_path / "server.yaml"
    file.write_text(f"plugin: {tmp_path / 'tilt.py'}\ntilt-by: -1\n")
    assert "tilt_by must be a number > 0" in run("serve --port 0 --config", str(file), status=2).err


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    found = parse(tmp_path, page.partition("```yaml\n")[2].partition("```")[0])
    assert (found.model, found.max_num_seqs, found.log_prompts) == ("/srv/model", 128, True)
    assert found.allow_origin == ["https://a.example", "https://b.example"]
    assert found.api_key_file == Path("/etc/nucleate/api-keys")


def test_errors_have_status_2_and_one_line(tmp_path: Path, run: Any) -> None:
    (tmp_path / "a.yaml").write_text("prot: 1\n")
    captured = run("serve --config", str(tmp_path / "a.yaml"), status=2).err
    assert captured == f"nucleate: {tmp_path / 'a.yaml'}: unknown key 'prot'; did you mean 'port'?\n"


def test_the_default_name_of_a_file_is_its_own(tmp_path: Path) -> None:
    file = tmp_path / "gemma.gguf"
    file.touch()
    for model, name in ((str(file), "gemma.gguf"), (str(tmp_path), str(tmp_path)), ("owner/name", "owner/name")):
        assert flags.model_names(command_parser("serve").parse_args(["--model", model]))[0] == name
    given = command_parser("serve").parse_args(["--model", str(file), "--served-model-name", "x"])
    assert flags.model_names(given)[0] == "x"
