"""Settings of a job that are declared as fields: options of `loom run` for them, and tables of a job.toml."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from torchloom.errors import BadInput
from torchloom.protocol.job_spec import Option
from torchloom.shared.suggestions import did_you_mean

Table = TypeVar("Table", bound=msgspec.Struct)


class OptionField(NamedTuple):
    """A field of a job that can be given as an option."""

    name: str
    hint: Any
    """Its type, with the bounds of its values."""
    kind: type
    """bool, int, float, str, tuple (may be repeated) or dict (NAME=VALUE, may be repeated)."""
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"


def declared_options(settings: type[msgspec.Struct]) -> Iterator[OptionField]:
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        kind, *marks = get_args(hints[field.name]) or (hints[field.name],)
        for mark in marks:
            if isinstance(mark, Option):
                default = field.default_factory() if field.default is msgspec.NODEFAULT else field.default
                yield OptionField(field.name, hints[field.name], get_origin(kind) or kind, default, mark)


def add_options(parser: ArgumentParser, settings: type[msgspec.Struct]) -> None:
    """Add the options of such settings. One that is not typed is None: its default is that of the field."""
    for field in declared_options(settings):
        words: dict[str, Any] = {"default": None, "help": _help(field)}
        if field.kind is bool and not field.default:
            words["action"] = "store_true"
        elif field.kind is bool:
            words |= {"type": int, "choices": [0, 1]}
        else:
            words["metavar"] = field.option.metavar
            words |= {"action": "append"} if field.kind in {tuple, dict} else {"type": field.kind}
        parser.add_argument(field.flag, **words)


def read_options(args: Namespace, settings: type[msgspec.Struct]) -> dict[str, Any]:
    """The values that were typed, by the name of their field; BadInput names an option whose value is out of bounds."""
    return {
        field.name: _checked(field, _value(field, value))
        for field in declared_options(settings)
        if (value := getattr(args, field.name, None)) is not None
    }


def _help(field: OptionField) -> str:
    text = field.option.help
    if field.kind in {tuple, dict}:
        return f"{text}; may be repeated"
    default = f"{field.default:g}" if field.kind in {bool, int, float} else field.default
    return f"{text}; default: {default}" if field.default else text


def _value(field: OptionField, value: Any) -> Any:
    if field.kind is bool:
        return bool(value)
    if field.kind is tuple:
        return tuple(part for text in value for part in text.split(","))
    if field.kind is dict:
        return dict(_pair(field, text) for text in value)
    return value


def _checked(field: OptionField, value: Any) -> Any:
    try:
        return msgspec.convert(value, field.hint)
    except msgspec.ValidationError as error:
        shown = ",".join(value) if isinstance(value, tuple) else value
        raise BadInput(f"{field.flag} {shown}: {error}", hint="`loom run --help` explains") from error


def _pair(field: OptionField, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise BadInput(f"{field.flag} {text!r}", hint=f"{field.flag} {field.option.metavar}")
    return name, value


def read_table(given: Mapping[str, object], kind: type[Table], hint: str = "") -> Table:
    """The settings in a table; BadInput names one that there is not, or whose value cannot be."""
    names = kind.__struct_fields__
    for key in given:
        if key not in names:
            raise BadInput(f"there is no setting {key!r}", hint=did_you_mean(key, names))
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadInput(str(error).replace("`$.", "`"), hint=hint) from error
