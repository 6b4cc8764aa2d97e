"""Rules of a policy as people write them: what is written is read as it was, and nonsense is told what is wrong."""

from __future__ import annotations

import contextlib
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchloom.core.detect.kinds_and_responses import HANGS, KINDS
from torchloom.core.incidents.rule_lookup import DEFAULTS, ENDING
from torchloom.errors import BadInput
from torchloom.job.policy_syntax import EVENTS, RESPONSES, parse_rule, rules, written
from torchloom.protocol.job_spec import Response, Rule


@st.composite
def sensible(draw: st.DrawFn) -> Rule:
    calm = [response for response in RESPONSES if response not in ENDING]
    do = draw(st.lists(st.sampled_from(calm), unique=True, max_size=4))
    last = draw(st.sampled_from([None, *sorted(ENDING)])) if do else draw(st.sampled_from(sorted(ENDING)))
    on = draw(st.sampled_from(EVENTS))
    if on == "crash":  # there is nothing left to be done anything with
        do, last = [], draw(st.sampled_from(["report", "restart"]))
    rolls = last == "rollback"
    return Rule(
        on=on,
        do=(*do, *([last] if last else [])),  # type: ignore[arg-type]
        after=draw(st.none() | st.floats(0, 1e300)) if on in HANGS else None,
        back=draw(st.integers(1, 1000)) if rolls else 1,
        skip=draw(st.booleans()) if rolls else False,
        limit=draw(st.none() | st.integers(0, 1_000_000)) if on != "crash" else None,
    )


@given(sensible())
def test_every_rule_that_is_written_is_read_as_it_was(rule: Rule) -> None:
    assert parse_rule(written(rule)) == rule


@given(st.text() | st.builds("{}={}".format, st.sampled_from(EVENTS), st.text()))
def test_whatever_is_written_is_a_rule_or_is_told_what_is_wrong(text: str) -> None:
    with contextlib.suppress(BadInput):  # anything else would be a traceback
        rule = parse_rule(text)
        assert parse_rule(written(rule)) == rule


def test_the_defaults_can_be_written_too() -> None:
    assert [parse_rule(written(rule)) for rule in DEFAULTS.values()] == list(DEFAULTS.values())


def test_what_the_documents_show() -> None:
    assert parse_rule("hang=stacks+restart@30") == Rule(on="hang", do=("stacks", "restart"), after=30)
    assert parse_rule("hang = stacks + restart @ 30s , limit=2") == Rule(
        on="hang", do=("stacks", "restart"), after=30, limit=2
    )
    assert parse_rule("not_finite=rollback,back=2,skip") == Rule(on="not_finite", do=("rollback",), back=2, skip=True)
    assert parse_rule("held=report@0") == Rule(on="held", do=("report",), after=0)


@pytest.mark.parametrize(
    ("text", "told", "hint"),
    [
        ("", "is not a rule", "hang=restart@30"),
        ("hang", "is not a rule", "hang=restart@30"),
        ("hnag=restart", "event 'hnag' is unknown", "did you mean hang?"),
        ("zzz=restart", "event 'zzz' is unknown", "there are: "),
        ("hang=restrat", "response 'restrat' is unknown", "did you mean restart"),
        ("hang=", "response '' is unknown", "there are: report"),
        ("hang=stacks+", "response '' is unknown", "there are: report"),
        ("hang=restart@", "the time in 'restart@' must be a number", ""),
        ("hang=restart@soon", "must be a number, not 'soon'", ""),
        ("hang=restart@-1", "must be a number", ""),
        ("hang=restart@inf", "must be a number", ""),
        ("hang=restart,limit=-1", "limit in", ""),
        ("straggler=evict@30", "acted on at once", "a time is for hang"),
        ("crash=restart,limit=3", "budget of restarts", "--max-restarts"),
        ("crash=pause", "its ranks are gone", "crash=restart"),
        ("hang=restart,limit=1.5", "must be a whole number", ""),
        ("hang=restart,limit=", "must be a number", ""),
        ("hang=restart,limit=99999999", "limit", "EVENT=RESPONSE"),
        ("hang=rollback,back=0", "back", "EVENT=RESPONSE"),
        ("hang=rollback,skip=1", "'skip=1' is not known in a rule", "EVENT=RESPONSE"),
        ("hang=restart,often", "'often' is not known in a rule", "EVENT=RESPONSE"),
        ("hang=restart,back=2", "back and skip are about a rollback", "hang=rollback,back=2"),
        ("hang=restart+stacks", "nothing can be done after restart", "put restart last"),
        ("hang=stacks+stacks", "stacks stands there twice", ""),
    ],
)
def test_what_is_wrong_is_told(text: str, told: str, hint: str) -> None:
    with pytest.raises(BadInput) as error:
        parse_rule(text)
    assert told in error.value.message
    assert hint in error.value.hint


def test_there_is_one_rule_for_an_event() -> None:
    assert rules(["hang=restart", "crash=report"]) == (
        Rule(on="hang", do=("restart",)),
        Rule(on="crash", do=("report",)),
    )
    with pytest.raises(BadInput, match="two rules for hang: hang=report and hang=restart@9"):
        rules(["hang=report", "crash=report", "hang=restart@9"])


def test_all_events_and_responses_can_be_named() -> None:
    assert set(KINDS) == set(EVENTS)
    assert set(get_args(Response)) == set(RESPONSES)
