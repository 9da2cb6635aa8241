"""The options of the models of the ``llm`` plug-in follow from the sampling parameters."""

from __future__ import annotations

import importlib.util
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nucleate.plugins.stage_check import inside
from nucleate.sampling_params import FIELDS

pydantic = pytest.importorskip("pydantic", reason="pydantic is not installed")
if importlib.util.find_spec("llm") is None:  # the options do not need it
    names = {name: type(name, (), {}) for name in ("Model", "AsyncModel", "Options", "ModelError")}
    sys.modules["llm"] = SimpleNamespace(hookimpl=lambda function: function, **names)  # type: ignore[assignment]
    from nucleate.integrations.llm_plugin import WITHOUT, checked, given_values, options_class

    del sys.modules["llm"], sys.modules["nucleate.integrations.llm_plugin"]
else:
    from nucleate.integrations.llm_plugin import WITHOUT, checked, given_values, options_class


class Options(pydantic.BaseModel):  # type: ignore[misc]
    """Like the class of ``llm``."""

    model_config = pydantic.ConfigDict(extra="forbid")


@pytest.fixture(scope="module")
def options() -> Any:
    return options_class(Options)


def test_every_sampling_parameter_is_an_option_with_its_help(options: Any) -> None:
    found = options.model_json_schema()["properties"]
    assert [*found] == [name for name in FIELDS if name not in WITHOUT]
    for name, field in found.items():
        assert field["description"] == FIELDS[name].described
        assert field["default"] is None


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in WITHOUT])
def test_values_are_checked_and_can_be_logged(name: str, options: Any) -> None:
    for value in inside(FIELDS[name]):
        found = given_values(options(**{name: value}))
        assert {key: FIELDS[key].check(one) for key, one in found.items()} == {name: FIELDS[name].check(value)}
        assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("temperature", "0.5", 0.5),
        ("top_k", "3", 3),
        ("max_tokens", "none", None),
        ("ignore_eos", "true", True),
        ("stop", "The end", ["The end"]),
        ("logit_bias", "5=1.5,7=-2", {"5": 1.5, "7": -2.0}),
        ("stop_token_ids", "1,2", [1, 2]),
        ("order", "top_k,temperature", ["top_k", "temperature"]),
        ("pipeline", "top_k(3) | greedy", [{"stage": "top_k", "k": 3}, {"stage": "greedy"}]),
        ("structured_outputs", '{"regex": "a+"}', {"regex": "a+"}),
    ],
)
def test_text_is_parsed_as_on_the_command_line(name: str, text: str, value: Any, options: Any) -> None:
    assert checked(name, text) == value
    assert getattr(options(**{name: text}), name) == value


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": "-1"}, "temperature must be a number >= 0"),
        ({"top_k": "many"}, "top_k must be an integer"),
        ({"logit_bias": "5"}, "logit_bias must be"),
        ({"temprature": 1}, "Extra inputs are not permitted"),
        ({"n": 2}, "Extra inputs are not permitted"),
    ],
)
def test_an_invalid_option_is_an_error_that_names_it(values: dict[str, Any], message: str, options: Any) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        options(**values)
