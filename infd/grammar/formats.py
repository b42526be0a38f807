"""Regular expressions of JSON Schema's formats. Sources: RFC 3339, 5321, 1123, 4291, 3986, 4122."""

from __future__ import annotations

from typing import Final

_DATE: Final = (
    r"[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|[12][0-9]))"
)
_TIME: Final = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,9})?([Zz]|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_OCTET: Final = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4: Final = rf"{_OCTET}(\.{_OCTET}){{3}}"
_GROUP: Final = "[0-9A-Fa-f]{1,4}"
_TAIL: Final = f"({_GROUP}:{_GROUP}|{_IPV4})"
_IPV6: Final = "|".join(
    (
        f"({_GROUP}:){{6}}{_TAIL}",
        f"::({_GROUP}:){{5}}{_TAIL}",
        f"({_GROUP})?::({_GROUP}:){{4}}{_TAIL}",
        f"(({_GROUP}:){{0,1}}{_GROUP})?::({_GROUP}:){{3}}{_TAIL}",
        f"(({_GROUP}:){{0,2}}{_GROUP})?::({_GROUP}:){{2}}{_TAIL}",
        f"(({_GROUP}:){{0,3}}{_GROUP})?::{_GROUP}:{_TAIL}",
        f"(({_GROUP}:){{0,4}}{_GROUP})?::{_TAIL}",
        f"(({_GROUP}:){{0,5}}{_GROUP})?::{_GROUP}",
        f"(({_GROUP}:){{0,6}}{_GROUP})?::",
    )
)
_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9\\-]{0,61}[A-Za-z0-9])?"
_HOST: Final = rf"{_LABEL}(\.{_LABEL})*"
_ATOM: Final = r"[A-Za-z0-9!#$%&'*+\-/=?\^_`{|}~]+"
_CODED: Final = "%[0-9A-Fa-f]{2}"
_CHARACTER: Final = rf"([A-Za-z0-9\-._~!$&'()*+,;=:@]|{_CODED})"
_SEGMENT: Final = rf"(/{_CHARACTER}*)*"
_USER: Final = rf"([A-Za-z0-9\-._~!$&'()*+,;=:]|{_CODED})*"
_NAME: Final = rf"([A-Za-z0-9\-._~!$&'()*+,;=]|{_CODED})*"
_REST: Final = rf"(\?({_CHARACTER}|[/?])*)?(#({_CHARACTER}|[/?])*)?"
_AUTHORITY: Final = rf"//({_USER}@)?({_NAME}|\[({_IPV6})\])(:[0-9]*)?"
_HOUR: Final = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"

PATTERNS: Final = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"({_DATE})[Tt]({_TIME})",
    "duration": f"P([0-9]+W|([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)({_HOUR})?|{_HOUR})",
    "email": rf"{_ATOM}(\.{_ATOM})*@{_HOST}",
    "hostname": _HOST,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": rf"[A-Za-z][A-Za-z0-9+\-.]*:({_AUTHORITY}{_SEGMENT}|/?{_CHARACTER}+{_SEGMENT}|/)?{_REST}",
    "uuid": "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}",
}
