"""Rules of a policy as people write them: `hang=stacks+restart@30`, `not_finite=rollback,back=2,skip`.

    EVENT=RESPONSE[+RESPONSE...][@SECONDS][,limit=N][,back=N][,skip]

`@SECONDS` is how long a hang may last before anything is done, `limit` how often it is done within the job's window of
restarts, `back` how many checkpoints a rollback goes back, and `skip` leaves out the batches that led there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import get_args

import msgspec

from torchloom.core.detect.kinds_and_responses import HANGS, KINDS
from torchloom.core.incidents.rule_lookup import ENDING
from torchloom.errors import BadInput
from torchloom.protocol.job_spec import Response, Rule
from torchloom.shared.suggestions import did_you_mean

EVENTS: tuple[str, ...] = tuple(KINDS)
RESPONSES: tuple[str, ...] = get_args(Response)
FORM = "EVENT=RESPONSE[+RESPONSE…][@SECONDS][,limit=N][,back=N][,skip]"


def parse_rule(text: str) -> Rule:
    event, equals, rest = text.partition("=")
    if not equals:
        raise BadInput(f"{text!r} is not a rule", hint=f"write {FORM}, for example hang=restart@30")
    return rule(event.strip(), rest)


def rule(event: str, text: str) -> Rule:
    """A rule for an event, from what stands behind its name."""
    _known("event", event, EVENTS)
    what, *more = [part.strip() for part in text.split(",")]
    responses, at, after = what.partition("@")
    do = [part.strip() for part in responses.split("+")]
    for response in do:
        _known("response", response, RESPONSES)
    _in_order(f"{event}={text}", do)
    fields: dict[str, object] = {"on": event, "do": do}
    if at:
        if event not in HANGS:
            raise BadInput(f"{event}={text}: it is acted on at once", hint=f"a time is for {', '.join(HANGS)}")
        fields["after"] = _number(f"the time in {text!r}", after.strip().removesuffix("s"))
    for part in more:
        name, _, value = part.partition("=")
        if name == "skip" and not value:
            fields["skip"] = True
        elif name in {"limit", "back"}:
            number = _number(f"{name} in {text!r}", value)
            if number != int(number):
                raise BadInput(f"{name} in {text!r} must be a whole number")
            fields[name] = int(number)
        else:
            raise BadInput(f"{part!r} is not known in a rule", hint=f"write {FORM}")
    if event == "crash" and not set(do) <= {"report", "restart"}:
        raise BadInput(f"{event}={text}: its ranks are gone", hint="crash=restart, or crash=report: do not start again")
    if event == "crash" and "limit" in fields:
        raise BadInput(f"{event}={text}: the budget of restarts is the limit", hint="--max-restarts N")
    if "rollback" not in do and {"back", "skip"}.intersection(fields):
        raise BadInput(f"{event}={text}: back and skip are about a rollback", hint=f"{event}=rollback,back=2")
    try:
        return msgspec.convert(fields, Rule)
    except msgspec.ValidationError as error:
        raise BadInput(f"{event}={text}: {error}", hint=f"write {FORM}") from None


def rules(texts: Iterable[str]) -> tuple[Rule, ...]:
    """One for each event: it would not be clear which of two is meant."""
    by_event: dict[str, tuple[str, Rule]] = {}
    for text in texts:
        rule = parse_rule(text)
        if rule.on in by_event:
            raise BadInput(f"two rules for {rule.on}: {by_event[rule.on][0]} and {text}", hint="leave one of them out")
        by_event[rule.on] = text, rule
    return tuple(rule for _, rule in by_event.values())


def written(rule: Rule) -> str:
    """As it would be parsed."""
    after = f"@{rule.after!r}".removesuffix(".0") if rule.after is not None else ""  # all digits, and no more
    limit = f",limit={rule.limit}" if rule.limit is not None else ""
    back = f",back={rule.back}" if rule.back != 1 else ""
    return f"{rule.on}={'+'.join(rule.do)}{after}{limit}{back}{',skip' if rule.skip else ''}"


def _known(what: str, word: str, words: tuple[str, ...]) -> None:
    if word not in words:
        raise BadInput(f"{what} {word!r} is unknown", hint=did_you_mean(word, words))


def _in_order(text: str, do: list[str]) -> None:
    """Nothing can follow what ends all ranks, and nothing is done twice."""
    for place, response in enumerate(do):
        if response in ENDING and place + 1 < len(do):
            raise BadInput(
                f"{text}: nothing can be done after {response}", hint=f"it ends all ranks: put {response} last"
            )
        if response in do[:place]:
            raise BadInput(f"{text}: {response} stands there twice")


def _number(what: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise BadInput(f"{what} must be a number, not {text!r}")
    return number
