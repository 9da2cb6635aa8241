r"""String formats that token masks enforce, as regular expressions.

The expressions are valid for llguidance and for Python, so that masks and ``validation`` agree. They match no invalid
text. Some are stricter than their format, see docs/structured.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class Format(NamedTuple):
    """A regular expression that matches the whole text, and the maximum length in characters."""

    pattern: str
    max_length: int | None = None

    @property
    def search_pattern(self) -> str:
        """The regular expression with anchors, because JSON schemas search in a string."""
        return f"^(?:{self.pattern})$"


def _one_of(*options: str) -> str:
    return f"(?:{'|'.join(options)})"


# RFC 3339, with months and leap years as in the Gregorian calendar
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = _one_of(
    f"{_YEAR}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])",
    f"{_YEAR}-(?:0[13-9]|1[0-2])-(?:29|30)",
    f"{_YEAR}-(?:0[13578]|1[02])-31",
    f"{_LEAP_YEAR}-02-29",
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_MINUTE_OF_DAY = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_OFFSET = f"(?:[Zz]|[+-]{_MINUTE_OF_DAY})"
_UTC = "(?:[Zz]|[+-]00:00)"
_ORDINARY_TIME = f"{_MINUTE_OF_DAY}:[0-5][0-9]{_FRACTION}{_OFFSET}"
_LEAP_SECOND = f"23:59:60{_FRACTION}{_UTC}"
_TIME = _one_of(_ORDINARY_TIME, _LEAP_SECOND)
_DATE_TIME = _one_of(f"{_DATE}[Tt]{_ORDINARY_TIME}", f"{_YEAR}-(?:06-30|12-31)[Tt]{_LEAP_SECOND}")
_COUNT = "[0-9]{1,9}"
_DURATION_TIME = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DURATION_DATE = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = f"P(?:{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME}|{_COUNT}W)"

# RFC 4291 and 3986
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"(?:{_OCTET}\.){{3}}{_OCTET}"
_HEX = "[0-9A-Fa-f]"
_GROUP = f"{_HEX}{{1,4}}"
_LAST_GROUPS = f"(?:{_GROUP}:{_GROUP}|{_IPV4})"
_GROUPS_BEFORE = [f"(?:(?:{_GROUP}:){{0,{count - 1}}}{_GROUP})?" if count else "" for count in range(8)]
_ALL_BUT_LAST_GROUPS = [f"{_GROUPS_BEFORE[count]}::(?:{_GROUP}:){{{5 - count}}}" for count in range(6)]
_IPV6 = _one_of(
    f"{_one_of(f'(?:{_GROUP}:){{6}}', *_ALL_BUT_LAST_GROUPS)}{_LAST_GROUPS}",
    f"{_GROUPS_BEFORE[6]}::{_GROUP}",
    f"{_GROUPS_BEFORE[7]}::",
)

# RFC 1123, without the labels that RFC 5890 reserves (two hyphens in the third and fourth place)
_LETTER = "[A-Za-z0-9]"
_INNER = "[A-Za-z0-9-]"
_LABEL = (
    f"{_LETTER}(?:{_LETTER}|{_INNER}{_LETTER}|{_INNER}{{2}}{_LETTER}"
    f"|{_INNER}(?:{_LETTER}{_INNER}|-{_LETTER}){_INNER}{{0,58}}{_LETTER})?"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"

# RFC 5321
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\[ -~])*"'
_EMAIL = rf"(?:{_ATOM}(?:\.{_ATOM})*|{_QUOTED})@(?:{_HOSTNAME}|\[(?:{_IPV4}|IPv6:{_IPV6})\])"


def _uri(letters: str, private: str, relative: bool) -> str:
    """Return the texts of RFC 3986. letters, private: the further characters of RFC 3987. relative: and references."""
    unreserved = f"A-Za-z0-9._~{letters}-"
    delimiters = "!$&'()*+,;="
    escape = f"%{_HEX}{{2}}"
    character = f"(?:[{delimiters}:@{unreserved}]|{escape})"
    user = f"(?:[{delimiters}:{unreserved}]|{escape})*"
    name = f"(?:[{delimiters}{unreserved}]|{escape})*"
    literal = rf"\[(?:{_IPV6}|[Vv]{_HEX}+\.[{delimiters}:A-Za-z0-9._~-]+)\]"
    authority = f"(?:{user}@)?(?:{literal}|{name})(?::[0-9]{{0,5}})?"
    path = f"(?:/{character}*)*"
    end = rf"(?:\?(?:{character}|[/?{private}])*)?(?:#(?:{character}|[/?])*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    rooted = f"(?://{authority}{path}|/(?:{character}+{path})?|)"
    if not relative:
        return f"{scheme}(?:{rooted}|{character}+{path}){end}"
    first = f"(?:[{delimiters}@{unreserved}]|{escape})+"  # without a colon, which would end a scheme
    return f"(?:(?:{scheme})?{rooted}|{scheme}{character}+{path}|{first}{path}){end}"


_PLANES = "".join(rf"\U{plane:04x}0000-\U{plane:04x}fffd" for plane in range(1, 14)) + r"\U000e1000-\U000efffd"
_IRI_LETTERS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef" + _PLANES
_IRI_PRIVATE = r"\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"

# RFC 6901 and 6570
_POINTER = r"(?:/(?:[^/~\x00-\x1f]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|%{_HEX}{{2}})(?:\.?(?:[A-Za-z0-9_]|%{_HEX}{{2}}))*(?::[1-9][0-9]{{0,3}}|\*)?"
_TEMPLATE = (
    rf"(?:[!#$&(-;=?-\[\]_a-z~{_IRI_LETTERS}{_IRI_PRIVATE}]|%{_HEX}{{2}}"
    rf"|\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\}})*"
)

FORMATS: Final[Mapping[str, Format]] = {
    "date-time": Format(_DATE_TIME),
    "date": Format(_DATE),
    "time": Format(_TIME),
    "duration": Format(_DURATION),
    "email": Format(_EMAIL, 254),
    "hostname": Format(_HOSTNAME, 253),
    "ipv4": Format(_IPV4),
    "ipv6": Format(_IPV6),
    "uri": Format(_uri("", "", relative=False)),
    "uri-reference": Format(_uri("", "", relative=True)),
    "iri": Format(_uri(_IRI_LETTERS, _IRI_PRIVATE, relative=False)),
    "iri-reference": Format(_uri(_IRI_LETTERS, _IRI_PRIVATE, relative=True)),
    "uri-template": Format(_TEMPLATE),
    "uuid": Format("-".join(f"{_HEX}{{{length}}}" for length in (8, 4, 4, 4, 12))),
    "json-pointer": Format(_POINTER),
    "relative-json-pointer": Format(rf"(?:0|[1-9][0-9]{{0,8}})(?:#|{_POINTER})"),
}
"""String formats that token masks enforce."""
