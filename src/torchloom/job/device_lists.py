"""Lists of devices as people write them: `["0 1" "0 1"]`, `0 1`, `0:1 0:1`, `{'n1': [0 1], 'n2': [2 3]}`.

    list    = groups, in brackets or without | "{" node ":" group ... "}" | devices of one group
    group   = devices in quotes or brackets, or with colons between them
    devices = whole numbers

Commas and blanks separate. A list of numbers alone is one group; a quoted text is always a group. A key that is a
number stands for no particular node. The text is read token by token, and nothing in it is evaluated.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from torchloom.errors import BadInput
from torchloom.protocol.ids import NAME
from torchloom.protocol.job_spec import DeviceGroup
from torchloom.threadlet.process.identity import sanitised

FORM = """write ["0 1" "0 1"]: the devices of each node in quotes"""
MOST_DEVICE = 1023
MOST_GROUPS = 1000
MOST_IN_GROUP = 1024
_DEEPEST = 3
_TOKEN = re.compile(
    r"""(?P<number>[0-9]+)|(?P<mark>[\[\](){}:])|"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<word>[A-Za-z_][\w.-]*)""",
    re.ASCII,
)
_BLANKS = re.compile(r"[\s,;]*")
_CLOSING = {"[": "]", "(": ")", "{": "}"}

Item = int | str | list["Item"] | dict[str, "Item"]
"""A number, a quoted text, a list, or groups by node."""


class _Quoted(str):
    """A text that was quoted, so that it is no mark."""

    __slots__ = ()


def parse_groups(text: str) -> tuple[DeviceGroup, ...]:
    """The groups of devices in a text, in the order of ranks; BadInput says what is wrong."""
    tokens = list(_tokens(text))
    items = _Parser(tokens).sequence("", 0)
    if not items:
        raise BadInput("there is no device", hint=FORM)
    return make_groups(items)


def make_groups(item: Item) -> tuple[DeviceGroup, ...]:
    """The groups in a list, or in a table of nodes, that was parsed here or as TOML."""
    while isinstance(item, list) and len(item) == 1 and isinstance(item[0], (list, dict)):
        item = item[0]
    if isinstance(item, dict):
        groups = tuple(DeviceGroup(devices=_devices(value), node=_node(key)) for key, value in item.items())
    elif isinstance(item, list) and item and not all(isinstance(part, int) for part in item):
        if any(isinstance(part, (int, dict)) for part in item):
            raise BadInput("devices and groups of devices are mixed", hint=FORM)
        groups = tuple(DeviceGroup(devices=_devices(part)) for part in item)
    else:
        groups = (DeviceGroup(devices=_devices(item)),)
    names = [group.node for group in groups if group.node is not None]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise BadInput(f"node {twice} stands there twice", hint="put its devices into one group")
    if not 1 <= len(groups) <= MOST_GROUPS:
        raise BadInput(f"there are {len(groups):,} groups", hint=f"1 to {MOST_GROUPS:,}")
    return groups


def _devices(item: Item) -> tuple[int, ...]:
    if isinstance(item, str):
        devices = [_number(part) for part in re.split(r"[\s,;:]+", item.strip()) if part]
    else:
        parts = item if isinstance(item, list) else [item]
        devices = [part for part in parts if isinstance(part, int) and not isinstance(part, bool)]
        if len(devices) < len(parts):
            raise BadInput("a group has something else than devices in it", hint=FORM)
    if not 1 <= len(devices) <= MOST_IN_GROUP:
        raise BadInput(f"a group has {len(devices):,} devices", hint=f"1 to {MOST_IN_GROUP:,}")
    if (wrong := next((device for device in devices if not 0 <= device <= MOST_DEVICE), None)) is not None:
        raise BadInput(f"device {wrong}", hint=f"devices are counted from 0 to {MOST_DEVICE:,}")
    if twice := [device for device, count in Counter(devices).items() if count > 1]:
        raise BadInput(
            f"device {twice[0]} stands twice in a group", hint="other jobs may share it, not two ranks of one"
        )
    return tuple(devices)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise BadInput(f"{text[:40]!r} is not a device", hint=f"devices are counted from 0 to {MOST_DEVICE:,}")
    return int(text)


def _node(key: str) -> str | None:
    """The node that a key names; None for a number, which only says which group it is."""
    return None if key.isascii() and key.isdecimal() else node_name(key)


def node_name(text: str) -> str:
    """A node as agents call it: a host name, in which `.` has become `-`."""
    name = sanitised(text)
    if not NAME.fullmatch(name):
        raise BadInput(f"{text[:40]!r} is not the name of a node", hint="`loom nodes` lists them")
    return name


def _tokens(text: str) -> Iterator[str | int]:
    place = _end_of_blanks(text, 0)
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise BadInput(f"{text[place : place + 20]!r} is not part of a list of devices", hint=FORM)
        kind = token.lastgroup or ""
        if kind == "number":
            yield _number(token[0])
        elif kind == "mark":
            yield token[0]
        else:
            yield _Quoted(token[kind])
        place = _end_of_blanks(text, token.end())


def _end_of_blanks(text: str, place: int) -> int:
    blanks = _BLANKS.match(text, place)
    return blanks.end() if blanks is not None else place


class _Parser:
    def __init__(self, tokens: Sequence[str | int]) -> None:
        self.tokens = tokens
        self.place = 0

    def sequence(self, closing: str, depth: int) -> list[Item]:
        """Items up to a closing bracket, or up to the end."""
        items: list[Item] = []
        while self.place < len(self.tokens):
            if self._is_mark(closing):
                self.place += 1
                return items
            items.append(self._item(depth))
        if closing:
            raise BadInput(f"{closing} is missing", hint=FORM)
        return items

    def _item(self, depth: int) -> Item:
        if depth > _DEEPEST:
            raise BadInput("it is nested too deeply", hint=FORM)
        token = self.tokens[self.place]
        self.place += 1
        if isinstance(token, int):
            return self._joined(token)
        if isinstance(token, _Quoted):
            return str(token)
        if token == "{":
            return self._pairs(depth)
        if token in _CLOSING:
            return self.sequence(_CLOSING[token], depth + 1)
        raise BadInput(f"{token} stands where a device is expected", hint=FORM)

    def _joined(self, first: int) -> Item:
        """One device, or the group of devices between colons."""
        devices: list[Item] = [first]
        while self._is_mark(":") and self.place + 1 < len(self.tokens):
            following = self.tokens[self.place + 1]
            if not isinstance(following, int):
                break
            devices.append(following)
            self.place += 2
        return first if len(devices) == 1 else devices

    def _pairs(self, depth: int) -> dict[str, Item]:
        pairs: dict[str, Item] = {}
        while not self._is_mark("}"):
            if self.place + 2 >= len(self.tokens):
                raise BadInput("} is missing", hint="write {'n1': [0 1], 'n2': [0 1]}")
            key = self.tokens[self.place]
            self.place += 1
            if (not isinstance(key, (_Quoted, int))) or not self._is_mark(":"):
                raise BadInput("a group has no node", hint="write {'n1': [0 1], 'n2': [0 1]}")
            if str(key) in pairs:
                raise BadInput(f"node {key} stands there twice", hint="put its devices into one group")
            self.place += 1
            pairs[str(key)] = self._item(depth + 1)
        self.place += 1
        return pairs

    def _is_mark(self, mark: str) -> bool:
        if not mark or self.place >= len(self.tokens):
            return False
        token = self.tokens[self.place]
        return token == mark and not isinstance(token, _Quoted)
