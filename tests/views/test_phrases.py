"""Every phrase that the code uses has its words, and the words need nothing that the code does not give."""

from __future__ import annotations

import ast
import math
import string
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

import torchloom
from torchloom.core.detect.hang import spans
from torchloom.core.incidents.rule_lookup import planned
from torchloom.core.state.change_ledger import abort_phrase
from torchloom.protocol.codec import decode_answer, encode
from torchloom.protocol.ids import RankId
from torchloom.protocol.job_spec import Response
from torchloom.protocol.operator import No
from torchloom.protocol.phrase import Phrase, phrase
from torchloom.protocol.records import Abort
from torchloom.views.wording.phrases import fill, render, shorten
from torchloom.views.wording.templates import RESPONSES, SHORT, TEMPLATE_PARTS, TEMPLATES

SOURCE = Path(torchloom.__file__).parent
ABORTS = get_args(get_type_hints(Abort)["why"])


def used() -> Iterator[tuple[str, set[str], str]]:
    """Each code that is given to `phrase` in the source, the names of its arguments, and where that is."""
    for path in SOURCE.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "phrase":
                where = f"{path.relative_to(SOURCE)}:{call.lineno}"
                for code in _codes(call.args[0]):
                    yield code, {str(keyword.arg) for keyword in call.keywords}, where


def _codes(node: ast.expr) -> Iterator[str]:
    """A literal, or one of two."""
    if isinstance(node, ast.Constant):
        yield str(node.value)
    elif isinstance(node, ast.IfExp):
        yield from (*_codes(node.body), *_codes(node.orelse))


def needed(template: str) -> set[str]:
    """Also within the texts to choose from."""
    fields = [(name, spec or "") for _, name, spec, _ in string.Formatter().parse(template) if name]
    return {name for name, _ in fields}.union(*(needed(spec) for _, spec in fields))


def test_every_phrase_has_its_words_and_what_they_need() -> None:
    for code, arguments, where in used():
        assert code in TEMPLATES, f"{where}: views/wording/templates.py has no {code}"
        assert needed(TEMPLATES[code]) <= arguments, f"{where}: {code} needs {needed(TEMPLATES[code])}"


@pytest.mark.parametrize("why", ABORTS)
def test_every_reason_of_an_abort_has_its_words(why: str) -> None:
    said = abort_phrase(Abort(why=why, ranks=(RankId("a", "b", 0),), refusal="no"))  # type: ignore[arg-type]
    assert said.code in TEMPLATES


@pytest.mark.parametrize("code", SHORT)
def test_what_is_said_in_short_needs_no_more_than_the_sentence(code: str) -> None:
    assert needed(SHORT[code]) <= needed(TEMPLATES[code])


def test_every_response_has_its_words() -> None:
    assert set(RESPONSES) == set(get_args(Response))
    assert render(planned("stacks", "pause")) == "the stacks of all ranks are taken, then all ranks are paused"


def test_a_code_has_one_template() -> None:
    assert sum(map(len, TEMPLATE_PARTS)) == len(TEMPLATES)


def test_no_two_codes_have_the_same_words() -> None:
    twice = [template for template in set(TEMPLATES.values()) if list(TEMPLATES.values()).count(template) > 1]
    assert twice == []


def test_ranks_are_named_in_few_words() -> None:
    def told(*numbers: int) -> str:
        return render(phrase("peers_died", ranks=spans(numbers)))

    assert told(3) == "rank 3 died"
    assert told(2, 0, 1, 9, 9) == "ranks 0-2, 9 died"
    assert told() == "no rank died"
    assert told(*range(0, 2000, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and others, 1,000 in all died"


def test_one_is_spoken_of_as_one() -> None:
    told = [render(phrase("hangs", ranks=spans(numbers))) for numbers in ([3], [3, 4], [3, 5], range(0, 2000, 2))]
    assert [text.rpartition(" ")[2] for text in told] == ["hangs", "hang", "hang", "hang"]
    told = [render(phrase("values_finite_again", names=names)) for names in (["loss"], ["loss", "lr"])]
    assert told == ["loss is finite again", "loss, lr are finite again"]
    told = [render(phrase("replicas_wait_for_it", count=count)) for count in (1, 2)]
    assert told == ["1 other replica waits for it", "2 other replicas wait for it"]
    assert render(phrase("beats_slow", sample_ms=None)) == "most of the latest beats were slow"
    assert render(phrase("beats_slow", sample_ms=1.25)) == "most of the latest beats were slow, 1.25 ms a sample"


def test_what_a_job_waits_for() -> None:
    free = phrase("of_node", node="n1", text=phrase("room_free", free=1, count=4, failed=2))
    silent = phrase("of_node", node="n2", text=phrase("room_silent"))
    there = phrase("nodes_there", nodes=[free, silent], more=None)
    many = phrase("nodes_there", nodes=[silent], more=12)
    span = phrase("span", least=1, most=2)
    assert render(phrase("waits_for_nodes", count=1, ranks=2, there=there)) == (
        "a node with room for 2 (n1: 1 of 4 free, 2 failed; n2: silent)"
    )
    assert render(phrase("waits_for_nodes", count=span, ranks=8, there=many)) == (
        "1 to 2 nodes with room for 8 (n2: silent; and 12 more)"
    )


def test_names_numbers_and_what_may_be_missing() -> None:
    said = phrase("change_gone", ranks=[RankId("a", "r", n) for n in range(5)])
    assert render(said) == "a/r/0, a/r/1, a/r/2 and 2 more went away"
    assert render(phrase("applied_on", step=12_000, count=1)) == "applied at step 12,000 on 1 rank"
    for seconds, text in ((0.5, "0.5 s"), (2.0, "2 s"), (45.0, "45 s"), (1800.0, "30 min"), (5400.0, "1 h 30 min")):
        assert render(shorten(phrase("if_it_lasts", seconds=seconds, policy="restart", keeps=True))).startswith(
            f"after {text}:"
        )
    assert render(phrase("applied_on", step=1, count=2)) == "applied at step 1 on 2 ranks"
    assert render(phrase("attempt_stopped", attempt=2, step=1204)) == "all ranks of attempt 2 are ended at step 1,204"
    assert render(phrase("attempt_stopped", attempt=2, step=None)) == "all ranks of attempt 2 are ended"
    assert render(phrase("resumes_at", step=30, path="/runs/step-30")) == "it continues from step 30 (/runs/step-30)"


def test_phrases_stand_within_phrases() -> None:
    inner = phrase("of_job", job="b", text=phrase("heals"))
    both = phrase("together", parts=[phrase("of_job", job="a", text="as it came"), inner])
    assert render(both) == "a: as it came; b: it heals from the others"


def test_lines_lists_of_numbers_and_times() -> None:
    lines = [phrase("heals"), "as it came"]
    assert (
        render(phrase("stacks", node="", lines=lines))
        == "where the ranks were:\n  it heals from the others\n  as it came"
    )
    assert render(phrase("stacks", node="", lines=[])) == "where the ranks were:"
    assert render(phrase("values_before", values=[1.0, 2 / 3, 3])) == "before: 1, 0.6667, 3"
    assert render(phrase("last_heard", rank=3, ago=1.26, parts=lines)).endswith(
        "1.3 s ago, it heals from the others, as it came"
    )
    told = [render(phrase("steps_as_before", seconds=seconds)) for seconds in (0.0008, 2.1, 2100.0)]
    assert told == ["steps take 0.8 ms again", "steps take 2.1 s again", "steps take 35 min again"]


def test_a_value_never_changes_the_rest_of_a_sentence() -> None:
    assert render(phrase("agents_are_on", nodes=["a|b", "{c}", "}"])) == "agents are on: a|b, {c}, }"
    assert render(phrase("waits_for_nodes", count="2|3", ranks="{ranks}", there="|")) == (
        "a node with room for {ranks} (|)"
    )
    assert render(phrase("not_prepared", error="{error}|", hint="|{hint}")) == "{error}| → |{hint}"
    assert fill("{ok:if|yes {name}|no {name}}!", {"ok": True, "name": "a|b"}) == "yes a|b!"
    assert fill("{ok:if|yes {name}|no {name}}!", {"ok": False, "name": "a|b"}) == "no a|b!"


@pytest.mark.parametrize("code", [*TEMPLATES, *(f"short.{code}" for code in SHORT)])
def test_every_sentence_can_be_made_of_whatever_another_version_sends(code: str) -> None:
    odd = ("", None, True, -1, 10**400, math.nan, "|{}}", (), ("a|",), ((0, 1), 7), ((1, 2, 3),), Phrase(code="no"))
    for value in odd:
        arguments = needed(SHORT[code.removeprefix("short.")] if code.startswith("short.") else TEMPLATES[code])
        assert isinstance(render(Phrase(code=code, args=dict.fromkeys(arguments, value))), str)
    assert isinstance(render(Phrase(code=code)), str)


def test_a_number_that_is_not_there_is_left_out() -> None:
    assert render(Phrase(code="beat_loss", args={"loss": None})) == "loss "
    assert render(Phrase(code="applied_on")) == "applied at step  on "


def test_text_from_outside_is_left_as_it_is() -> None:
    assert render("ValueError: {x} is odd") == "ValueError: {x} is odd"
    assert render(phrase("of_job", job="a", text="{job} {0}")) == "a: {job} {0}"


def test_a_phrase_of_a_newer_version_is_shown_somehow() -> None:
    assert "not_known_here" in render(Phrase(code="not_known_here", args={"step": 3}))
    assert render(Phrase(code="of_job", args={"job": "a"})) == "a: "
    assert "many" in render(Phrase(code="applied_on", args={"step": "many", "count": "x"}))


def test_a_phrase_travels_whole() -> None:
    said = No(why=phrase("together", parts=[phrase("applied_on", step=3, count=2), "text"]), hint="")
    assert decode_answer(encode(said)) == said
    numbers = No(why=phrase("values_before", values=[1.5, 2, 3.0]))
    assert decode_answer(encode(numbers)) == numbers
