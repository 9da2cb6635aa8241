"""String formats: the regular expressions are compared with independent checks, and masks with the expressions."""

from __future__ import annotations

import ipaddress
import json
import random
import re
import string
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from bundled_grammars import can_write, grammar_of
from tiers import count

from nucleate.parameters.parameter import ParameterError
from nucleate.structured_output.json_schema import FORMATS, TARGETS
from nucleate.structured_output.schema_soundness import replace_formats


def matches(name: str, text: str) -> bool:
    found = FORMATS[name]
    return re.fullmatch(found.pattern, text) is not None and len(text) <= (found.max_length or len(text))


def is_date(text: str) -> bool:
    if not re.fullmatch("[0-9]{4}-[0-9]{2}-[0-9]{2}", text):
        return False
    try:
        date(*map(int, text.split("-")))
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar() -> None:
    years = [1, 4, 99, 100, 400, 1000, 1900, 1999, 2000, 2023, 2024, 2100, 2400, 9999, 0]
    texts = [f"{year:04}-{month:02}-{day:02}" for year in years for month in range(14) for day in range(33)]
    assert [text for text in texts if matches("date", text) != is_date(text)] == []
    leap = [year for year in range(10_000) if matches("date", f"{year:04}-02-29")]
    assert leap == [year for year in range(1, 10_000) if is_date(f"{year:04}-02-29")]
    assert not any(
        matches("date", text) for text in ("2024-1-01", "24-01-01", "20240101", "2024-01-0১", "2024-01-01\n", "")
    )


def test_times_have_leap_seconds_only_at_the_end_of_a_utc_day() -> None:
    ends = ("Z", "z", "+00:00", "-00:00", "+05:30", "-23:59", "+24:00", "+00:60", "", "+1:00", "Z+01:00")
    for hour in range(25):
        for minute in (0, 29, 58, 59, 60):
            for second in (0, 59, 60, 61):
                for fraction in ("", ".5", ".123456789", ".", ",5"):
                    for end in ends:
                        text = f"{hour:02}:{minute:02}:{second:02}{fraction}{end}"
                        expected = (
                            end in ends[:6]
                            and fraction not in (".", ",5")
                            and hour < 24
                            and minute < 60
                            and (second < 60 or ((hour, minute, second) == (23, 59, 60) and end in ends[:4]))
                        )
                        assert matches("time", text) == expected, text
                        for day in ("2024-06-30", "2024-12-31", "2024-05-31", "2023-02-29"):
                            possible = day != "2023-02-29" and (second < 60 or day[5:] in ("06-30", "12-31"))
                            if hour in (0, 23) and end != "-23:59":
                                assert matches("date-time", f"{day}T{text}") == (expected and possible), (day, text)


def test_random_moments_are_date_times() -> None:
    rng = random.Random(1)
    for _ in range(count(300, 3000)):
        moment = datetime(1, 1, 1, tzinfo=UTC) + timedelta(seconds=rng.randrange(9998 * 365 * 86400))
        text = moment.isoformat().removesuffix("+00:00") + rng.choice(("Z", "+01:00", "-11:30"))
        assert matches("date-time", text)
        assert not matches("date-time", text.replace("T", " "))


def is_address(version: int) -> Callable[[str], bool]:
    kind: Any = ipaddress.IPv4Address if version == 4 else ipaddress.IPv6Address

    def check(text: str) -> bool:
        try:
            kind(text)
        except ValueError:
            return False
        return "%" not in text

    return check


def label_is_valid(label: str) -> bool:
    letters = {*string.ascii_letters, *string.digits}
    return (
        0 < len(label) <= 63 and {*label} <= letters | {"-"} and {label[0], label[-1]} <= letters and label[2:4] != "--"
    )


def is_hostname(text: str) -> bool:
    return len(text) <= 253 and all(map(label_is_valid, text.split(".")))


def is_pointer(text: str) -> bool:
    escapes_are_valid = all(part[:1] in ("0", "1") for part in text.split("~")[1:])
    return (text == "" or text[0] == "/") and escapes_are_valid and not any(ord(letter) < 32 for letter in text)


CHECKS: dict[str, tuple[Callable[[str], bool], str, list[str]]] = {
    "date": (is_date, "0123456789-", ["2024-02-29", "1999-12-31"]),
    "ipv4": (is_address(4), "0123456789.", ["192.168.0.1", "255.255.255.255", "0.0.0.0"]),
    "ipv6": (
        is_address(6),
        "01f:.",
        ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1:2:3::7:8", "::ffff:1.2.3.4", "1:2:3:4:5:6:1.2.3.4", "1::2:255.0.0.9",
         "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8", "1:2:3:4::1.2.3.4", "1:2:3:4:5::1.2.3.4"],
    ),
    "hostname": (
        is_hostname,
        "abZ09-._",
        ["www.example.com", "a", "a-b", "1-2.c", "xn--a", "ab--c", "abc--d", "a" * 63, "a" * 64,
         ".".join(["abcd"] * 50), ".".join(["ab"] * 85), "a." + "b" * 62 + "-", "x" * 60 + "--9", "a.", "a-.b"],
    ),
    "json-pointer": (is_pointer, "/~01a\n", ["", "/", "/a~0/~1", "/a//b", '/é"\\']),
    "uuid": (
        lambda text: [*map(len, text.split("-"))] == [8, 4, 4, 4, 12] and {*text} <= {*string.hexdigits, "-"},
        "0aF-g",
        ["2eb8aa08-aa98-11ea-B4AA-73b441d16380"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHECKS)
def test_mutated_texts_are_classified_as_by_an_independent_check(name: str) -> None:
    check, letters, texts = CHECKS[name]
    rng = random.Random(name)
    assert any(map(check, texts))
    for _ in range(count(2000, 40_000)):
        text = [*rng.choice(texts)]
        for _ in range(rng.choice((0, 1, 1, 2, 3))):
            place = rng.randrange(len(text) + 1)
            text[place : place + rng.choice((0, 0, 1, 1, 2))] = rng.choice((*letters, ""))
        assert matches(name, "".join(text)) == check("".join(text)), "".join(text)


EXAMPLES: dict[str, tuple[list[str], list[str]]] = {
    "date-time": (
        ["2024-02-29T12:00:00Z", "1998-12-31T23:59:60Z", "1998-06-30t23:59:60.5+00:00", "2000-01-01T00:00:00.1-08:00"],
        ["1998-12-31T23:58:60Z", "1998-12-30T23:59:60Z", "2023-02-29T12:00:00Z", "2024-01-01T24:00:00Z",
         "2024-01-01 12:00:00Z", "2024-01-01T12:00:00", "2024-01-01T12:00:00.1234567890Z"],
    ),
    "date": (["2024-02-29", "2000-02-29"], ["2023-02-29", "1900-02-29", "2024-04-31", "2024-13-01", "0000-01-01"]),
    "time": (["23:59:60Z", "12:00:00.25+05:30"], ["22:59:60Z", "23:59:60+01:00", "12:00:00", "24:00:00Z", "12:00:60Z"]),
    "duration": (
        ["P1Y2M3DT4H5M6S", "PT0S", "P4W", "P1DT12H", "P1M", "PT1M", "PT36H"],
        ["P", "PT", "P1", "1D", "P1YT", "PT1D", "P2D1Y", "P1Y2W", "P1Y1D", "PT1H1S", "P1.5D", "P১Y", "P1234567890D"],
    ),
    "email": (
        ["a@b", "joe.bloggs@example.com", '"joe bloggs"@example.com', r'"a\"@\\b"@example.com', "a+b~!@x.y-z.org",
         "a@[127.0.0.1]", "a@[IPv6:::1]", '""@a.b'],
        ["a", "@b", "a@", ".a@b", "a.@b", "a..b@c", "a b@c", "a@b_c", "a@b=c.d", "a@-b", "a@[127.0.0.300]", "a@[::1]",
         "a@xn--b", '"a"b@c', '"a@b', "é@b", "a" * 250 + "@b.cd"],
    ),
    "hostname": (
        ["example.com", "a" * 63 + ".b", "1host", "h0st-nam3", ".".join(["a" * 62] * 4)],
        ["", ".", "a.", ".a", "a..b", "-a", "a-", "a_b", "a" * 64, "xn--x", "XN--4gbwdl", "a.xn--a", "ab--c", "é.com",
         ".".join(["a" * 62] * 4) + ".aa", ".".join(["a" * 63] * 4)],
    ),
    "ipv4": (["192.168.0.1"], ["256.0.0.1", "1.2.3", "01.2.3.4", "1.2.3.4.5", "1.2.3.4/8", "১.2.3.4"]),
    "ipv6": (["::ffff:192.168.0.1", "1:2::192.168.0.1"], ["12345::", "1::2::3", ":::", "::1%eth0", "1:2:3:4:5:6:7"]),
    "uri": (
        ["http://a.b/?c=d#e", "mailto:a@b.c", "urn:a:b:1", "ldap://[2001:db8::7]/c=GB?o?one", "http://-.~_!$&'()*+,;=:%40:80@e",
         "a:", "tel:+1-816", "file:///etc/x", "http://[v1.a:b]/"],
        ["", "a", "//a.b/c", "/a", "a b:c", "http://a b", "http://a.b/<x>", "http://a.b/%zz", "1a:b", "a,b:c", "http://[::1",
         "http://2001:db8::7", r"\\x\y", 'http://a/"', "http://a.b/é", "http://a#b#c", "http://[12345::]"],
    ),
    "uri-reference": (
        ["", "a", "/a/b", "//a.b/c", "#f", "?q", "./a:b", "http://a.b", "a/b:c"],
        [r"\\x\y", "#a\\b", "a b", "1:b", "é"],
    ),
    "iri": (["http://ƒøø.ßår/?∂=π#ü", "a:ü"], ["/abc", "ü", "http://a b", "http://ƒøø/<", "a:\ue000"]),
    "iri-reference": (["/âππ", "#ü", "", "//ƒøø.ßår", "a:b?\ue000"], [r"\\x", "#a\\b", " "]),
    "uri-template": (
        ["", "http://a.b/{c:1}/{d}", "{+a,b*}{?c.d}", "a%20b{%41}", "é"],
        ["{", "}", "{}", "{a", "{a:0}", "{a:12345}", "{=a}", "{a b}", "a b", "a%zb", "<", "{a..b}"],
    ),
    "uuid": (["00000000-0000-0000-0000-000000000000"], ["0" * 32, "g" * 8 + "-0000-0000-0000-" + "0" * 12]),
    "json-pointer": (["", "/a~0b~1/0/ é"], ["a", "#", "/~", "/~2", "/a~"]),
    "relative-json-pointer": (["0", "1/a", "12#", "0/~0"], ["", "/a", "-1", "+1", "01", "0##", "0a", "0#/a"]),
}  # fmt: skip


def test_there_are_examples_of_every_format() -> None:
    assert EXAMPLES.keys() == FORMATS.keys()


def accepts(schema: dict[str, Any], text: str) -> bool:
    return can_write(grammar_of(json_schema=schema), json.dumps(text, ensure_ascii=False))


@pytest.mark.parametrize("name", FORMATS)
def test_masks_and_validation_agree_with_the_examples(name: str) -> None:
    valid, invalid = EXAMPLES[name]
    schema = {"type": "string", "format": name}
    compiled = grammar_of(json_schema=schema)
    for text in valid:
        assert matches(name, text), text
        assert accepts(schema, text), text
        assert compiled.validate(json.dumps(text), seconds=60) == [], text
    for text in invalid:
        assert not matches(name, text), text
        assert not accepts(schema, text), text
        [error] = compiled.validate(json.dumps(text), seconds=60)
        assert error.startswith("$: does not have the format ")


def test_a_format_applies_together_with_other_keywords() -> None:
    schema: dict[str, Any] = {"format": "hostname", "pattern": "^w", "maxLength": 300, "minLength": 4}
    assert accepts(schema, "www." + ".".join(["a" * 48] * 5))
    for text in ("ww", "a.bcd", "www_", "www." + ".".join(["a" * 49] * 5) + ".aaa"):
        assert not accepts(schema, text)
    schema = {"enum": ["2024-02-30", "2024-02-29"], "format": "date"}
    assert [accepts(schema, text) for text in schema["enum"]] == [False, True]
    compiled = grammar_of(json_schema={"format": "date"})
    assert compiled.validate("5") == []
    grammar_of(json_schema={"type": "integer", "format": "int64"})
    nullable = grammar_of(json_schema={"items": {"type": ["string", "null"], "format": "date"}})
    for given, expected in (('["2024-02-29",null]', True), ('["2023-02-29"]', False), ("[1]", False)):
        assert can_write(nullable, given) == expected


def test_plain_strings_share_one_pattern() -> None:
    properties = {name: {"type": "string", "format": "email", "title": name} for name in "abc"}
    schema: dict[str, Any] = {"properties": properties, TARGETS: {"#/$defs/x": {}}}
    replace_formats(schema, [schema, *properties.values()])
    assert schema["properties"]["a"] == schema["properties"]["c"] == {"$ref": "#format-email"}
    assert schema[TARGETS].keys() == {"#/$defs/x", "#format-email"}
    nullable: dict[str, Any] = {"type": ["null", "string"], "format": "date"}
    replace_formats(schema, [nullable])
    assert nullable == {"anyOf": [{"$ref": "#format-date"}, {"type": ["null"]}]}
    schema = {"type": "string", "format": "email"}
    replace_formats(schema, [schema])
    assert schema.keys() - {TARGETS} == {"type", "pattern", "maxLength"}


def test_the_patterns_of_formats_are_limited() -> None:
    limited = {f"p{i}": {"type": "string", "format": "iri", "minLength": i} for i in range(300)}
    with pytest.raises(
        ParameterError, match="characters in the patterns of formats beside other keywords; the maximum is 1000000"
    ):
        grammar_of(json_schema={"type": "object", "properties": limited})
    plain = {f"p{i}": {"type": "string", "format": "iri"} for i in range(300)}
    grammar_of(json_schema={"type": "object", "properties": plain})


@pytest.mark.parametrize("name", ["password", "int32", "binary", "path", "x-own", ""])
def test_unknown_formats_have_no_effect(name):
    compiled = grammar_of(json_schema={"type": "string", "format": name})
    assert compiled.ignored == ()


@pytest.mark.parametrize(
    ("name", "message"),
    [("dateTime", "did you mean date-time?"), ("Email", "did you mean email?"), ("regex", "supported: date,")],
)
def test_misspelled_and_unsupported_formats_are_errors(name, message):
    schema = {"type": "string", "format": name}
    with pytest.raises(ParameterError, match=re.escape(message)):
        grammar_of(json_schema=schema)
    assert grammar_of(json_schema=schema, on_unsupported="ignore").ignored
