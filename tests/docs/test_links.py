"""What the documents point to exists: files, headings, and the verbs of `loom`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchloom.cli.parser import build

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)")
VERB = re.compile(r"(?<![\w./-])loom(?: --(?:state[ =]\S+|no-color))* ([a-z][a-z-]*)")
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@every_page
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(without_code(page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, heading = target.partition("#")
        file = (page.parent / name) if name else page
        assert file.exists(), f"{page.name} links to {target}"
        if heading and file.suffix == ".md":
            assert heading in headings(file), f"{page.name} links to {target}"


@every_page
def test_every_verb_that_is_named_exists_or_is_said_to_be_planned(page: Path) -> None:
    verbs = build().verbs
    for line, text in code_of(page.read_text("utf-8")):
        for verb in VERB.findall(text):
            assert verb in verbs or "planned" in line.lower(), f"{page.name}: `loom {verb}` in {line!r}"


def test_the_verb_pattern_sees_what_it_should() -> None:
    assert VERB.findall("loom up --detach") == ["up"]
    assert VERB.findall("loom --state /x --no-color status") == ["status"]
    assert VERB.findall("ssh other loom join -") == ["join"]
    assert VERB.findall("import torchloom; loom = torchloom.attach(); loom.step()") == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    found = re.findall(r"^#{1,6} (.+)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).strip().replace(" ", "-") for text in found}


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


def code_of(text: str) -> Iterator[tuple[str, str]]:
    """Each piece of code with the line it stands in; prose may use the words as words."""
    fenced = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            yield line, line
        else:
            for piece in re.findall(r"`([^`]+)`", line):
                yield line, piece
