"""The words of every phrase. `render` is the one function that makes sentences of what was decided.

A template is a format string over the phrase's arguments, with these specifications besides Python's own:

    {ranks:ranks}    spans of ranks: `rank 3`, `ranks 0-6, 9`
    {do:responses}   what each response of a policy does, one after the other
    {do:then}        joined by `, then `
    {parts:first}    the first alone
    {ranks:names}    some names for a sentence: the first three, and how many more
    {count:#rank}    a number with its noun, or how many there are: `1 rank`, `3 ranks`
    {parts:;}        joined by semicolons instead of commas
    {lines:lines}    each on an indented line of its own
    {losses:.4g}     of several numbers, each in that format
    {left:time}      seconds in few words: `0.8 ms`, `2.1 s`, `35 min`
    {seconds:delay}  seconds that somebody has set: `2 s`, `30 min`
    {size:bytes}     a size: `640 B`, `1.2 GB`
    {why:? (|)}      nothing if it is empty, else in the text after `?`, at the bar or after it
    {who:or|nobody}  this text if it is empty
    {n:one|is|are}   the first text for a single one (a number, a name, a rank), else the second
    {ok:if|yes|no}   the first text if it is true or not empty, else the second

The texts of the last two may contain fields, but none with a bar.
What was passed over, by name and reason, is listed as `step-9 (torn), step-8 (no manifest)`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchloom.protocol.ids import RankId, ReplicaId
from torchloom.protocol.phrase import Phrase, Prose
from torchloom.views.format.numbers import delay, size
from torchloom.views.wording.templates import RESPONSES, SHORT, TEMPLATES

SHOWN = 3
"""Names in a sentence; the rest is counted."""
_SHORT = "short."
_TEMPLATES = {**TEMPLATES, **{f"{_SHORT}{code}": template for code, template in SHORT.items()}}


def render(prose: Prose) -> str:
    """What people read. Text from outside is left as it is."""
    if isinstance(prose, str):
        return prose
    try:
        return fill(_TEMPLATES[prose.code], prose.args)
    except (LookupError, ValueError, TypeError, OverflowError):  # of another version: better an odd text than none
        return str(prose)


def fill(template: str, fields: Mapping[str, Any]) -> str:
    """A template filled in with the fields of a record. One of two texts is chosen before its fields are filled in, so
    that no value, whatever it contains, changes the rest of the sentence."""
    parts = []
    for text, name, format_spec, conversion in _FORMATTER.parse(template):
        parts.append(text)
        if name is None:
            continue
        value, _ = _FORMATTER.get_field(name, (), fields)
        choice, _, texts = (format_spec or "").partition("|")
        if choice in {"if", "one"}:
            first, _, second = texts.partition("|")
            takes_first = _is_one(value) if choice == "one" else value
            parts.append(fill(first if takes_first else second, fields))
        else:
            parts.append(_FORMATTER.format_field(_FORMATTER.convert_field(value, conversion), format_spec or ""))
    return "".join(parts)


def shorten(prose: Prose) -> Prose:
    """The same to be rendered in fewer words, where there are any."""
    if isinstance(prose, str):
        return prose
    args = {name: shorten(value) if isinstance(value, Phrase) else value for name, value in prose.args.items()}
    for name, value in args.items():
        if isinstance(value, tuple):
            args[name] = tuple(shorten(item) if isinstance(item, Phrase) else item for item in value)
    return Phrase(code=f"{_SHORT}{prose.code}" if prose.code in SHORT else prose.code, args=args)


def render_all(texts: Iterable[Prose]) -> tuple[str, ...]:
    return tuple(map(render, texts))


def names(items: Iterable[object], most: int = SHOWN) -> str:
    """Some names for a sentence: the first few, and how many more."""
    listed = [str(item) for item in items]
    shown = ", ".join(listed[:most])
    return shown if len(listed) <= most else f"{shown} and {len(listed) - most:,} more"


def name_ranks(spans: Sequence[tuple[int, int] | int]) -> str:
    """ "rank 3", "ranks 0-6, 9"; of very many the first spans, and how many there are."""
    pairs = [span for span in spans if isinstance(span, tuple)]
    listed = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in pairs)
    if not pairs:
        return "no rank"
    more = "".join(f" and others, {count:,} in all" for count in spans if isinstance(count, int))
    return f"{'rank' if _is_one(spans) else 'ranks'} {listed}{more}"


def _is_one(value: object) -> bool:
    """Whether it is the number 1, a name, a single item, or a span of a single rank."""
    if isinstance(value, str):
        return True
    if not isinstance(value, Sequence):
        return value == 1
    return len(value) == 1 and (not isinstance(value[0], tuple) or value[0][0] == value[0][1])


def name_time(seconds: float) -> str:
    """ "0.8 ms", "2.1 s", "35 min"."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.0f} min"


class _Formatter(string.Formatter):
    def get_value(self, key: int | str, _args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return kwargs.get(str(key), "")  # an older version may have left it out

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec.startswith("or|"):
            return self.format_field(value, "") or format_spec[3:]
        if isinstance(value, Phrase):
            value = render(value)
        if isinstance(value, Mapping):
            value = tuple(f"{name} ({why})" for name, why in value.items())
        if isinstance(value, RankId | ReplicaId):
            value = str(value)
        elif isinstance(value, tuple):
            value, format_spec = self._listed(value, format_spec)
        if value is None or value == "":  # left out, or a number that JSON has no word for
            return ""
        if format_spec in _MEASURES:
            return _MEASURES[format_spec](value)
        if format_spec.startswith("#"):
            return f"{value:,} {format_spec[1:]}{'' if value == 1 else 's'}"
        if format_spec.startswith("?"):
            before, _, after = format_spec[1:].partition("|")
            return f"{before}{value:,}{after}" if isinstance(value, int) else f"{before}{value}{after}" if value else ""
        return str(super().format_field(value, format_spec))

    def _listed(self, items: tuple[Any, ...], format_spec: str) -> tuple[str | int, str]:
        """Several as one text or number, and what of the specification is left to be done with it."""
        if format_spec == "ranks":
            return name_ranks(items), ""
        if format_spec.startswith("#"):
            return len(items), format_spec
        if format_spec == "responses":
            items, format_spec = tuple(RESPONSES.get(item, item) for item in items), "then"
        own = format_spec in {"names", ";", "then", "first", "lines"} or format_spec.startswith("?")
        texts = [self.format_field(item, "" if own else format_spec) for item in items]
        match format_spec:
            case "names":
                return names(texts), ""
            case "lines":
                return "".join(f"\n  {text}" for text in texts), ""
            case "first":
                return texts[0] if texts else "", ""
            case ";" | "then":
                return ("; " if format_spec == ";" else ", then ").join(texts), ""
        return ", ".join(texts), format_spec if own else ""


_MEASURES: Mapping[str, Callable[[Any], str]] = {"time": name_time, "delay": delay, "bytes": size}
_FORMATTER = _Formatter()
