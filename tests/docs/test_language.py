"""The documents, the source and the help texts are written in plain English.

`INSTEAD` lists words and turns of phrase that are wrong wherever they appear, with what to write instead. Code is not
checked: names in Python, `inline code` and console output in Markdown. What the commands print is checked where it is
written, in the strings of the source.
"""

from __future__ import annotations

import argparse
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from torchloom.cli.parser import build

ROOT = Path(__file__).parent.parent.parent
SOURCE = ROOT / "src" / "torchloom"
README_LINES = 150

INSTEAD: Mapping[str, str] = {
    r"anew|afresh": "again, or a verb with re-: restart, recreate",
    r"whoever|whomever|whom": "the rank, process or person that …",
    r"he|him|his|himself": "it, or they for a person",
    r"(is|are|was|were|be|been|being) told": "receives, is reported, is informed",
    r"(tells?|told|telling) of": "reports",
    r"(hears?|heard|hearing) of": "learns of, receives",
    r"knows? nothing of": "does not use, does not know",
    r"(go|goes|went|gone|going) on": "continues, resumes; happens",
    r"(come|comes|came) to nothing": "fails, has no effect",
    r"what(ever)? (becomes?|became) of": "what happens to",
    r"(held|hold|holds) against": "counts against",
    r"so (many|often)|for so long": "the number: at most N, for N seconds",
    r"for want of": "without, because … is missing",
    r"fares?|fared": "the state of, how … is",
    r"for ever": "forever",
    r"for good(?! reason)": "permanently",
    r"in vain": "without success",
    r"of late": "recently",
    r"as it should be": "correct, as configured",
    r"without a word": "without an error, without a message",
    r"come what may": "always",
    r"wish(es|ed)?": "request, desired state",
    r"shall|ought": "must, should",
    r"lest|hitherto|thereof|therein|hereby|whence|thence|forthwith|whilst|albeit|naught|amiss|betimes": "a modern word",
    r"once and for all|of (its|their) own accord": "permanently; automatically",
}
GAP = r"""[\s#"']+"""
RULES = [(re.compile(rf"\b(?:{words.replace(' ', GAP)})\b", re.IGNORECASE), new) for words, new in INSTEAD.items()]


def in_markdown(text: str) -> str:
    """The prose of a page and its hand-written code: without inline code, links and console output."""
    text = re.sub(r"^```(?:console)?\n.*?^```$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`|\]\([^)]*\)", _blank, text)


def in_python(text: str) -> str:
    """The comments and strings of a module, each on its own line."""
    kept = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    lines = [""] * (text.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in kept:
            unprefixed = re.sub(r"^[a-zA-Z]+(?=[\"'])", "", token.string)
            content = re.sub(r"`[^`\n]*`|\{[^{}\n]*\}|\\n", _blank, unprefixed)
            for offset, line in enumerate(content.split("\n")):
                lines[token.start[0] - 1 + offset] += " " + line
    return "\n".join(lines)


def in_help() -> str:
    """What `loom --help` and `loom VERB --help` say."""
    parser = build()
    texts = [text for verb in (parser, *parser.verbs.values()) for text in _texts(verb)]
    return re.sub(r"`[^`\n]*`", _blank, "\n".join(texts))


def _texts(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from filter(None, (parser.description, parser.epilog))
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from (choice.help or "" for choice in action._choices_actions)
        yield action.help or ""


def _blank(match: re.Match[str]) -> str:
    return re.sub(r"[^\n]", "·", match[0])


def hits(text: str) -> list[str]:
    """Every word to replace, with its line and what to write instead."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: {' '.join(match[0].split())!r}: write {new}"
        for rule, new in RULES
        for match in rule.finditer(text)
    ]


def files() -> dict[str, list[Path]]:
    """What is checked: each page and example by its path, each package of the source by its name."""
    found: dict[str, list[Path]] = {}
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.*"), *(ROOT / "examples").iterdir()]
    for page in sorted(pages):
        if page.is_file() and page.suffix != ".pyc":
            found[str(page.relative_to(ROOT))] = [page]
    for module in sorted(SOURCE.rglob("*.py")):
        package = module.relative_to(SOURCE).parts[0]
        found.setdefault(package if package != module.name else SOURCE.name, []).append(module)
    return found


FILES = files()
HELP = "loom --help"


def hits_of(scope: str) -> list[str]:
    if scope == HELP:
        return hits(in_help())
    return [f"{file.relative_to(ROOT)} {hit}" for file in FILES[scope] for hit in hits(prose_of(file))]


def prose_of(file: Path) -> str:
    text = file.read_text("utf-8")
    match file.suffix:
        case ".md":
            return in_markdown(text)
        case ".py":
            return in_python(text)
        case _:
            return text


@pytest.mark.parametrize("scope", [HELP, *FILES])
def test_english_is_plain(scope: str) -> None:
    assert not (found := hits_of(scope)), "\n".join(found)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= README_LINES


def test_words_are_found_across_lines_and_case() -> None:
    assert hits("It goes\n  on anew.") == [
        "line 2: 'anew': write again, or a verb with re-: restart, recreate",
        "line 1: 'goes on': write continues, resumes; happens",
    ]
    assert len(hits("# So\n# many are told\n# of it")) == 3


def test_only_prose_is_checked() -> None:
    page = "A `wish` for [he](goes-on.md)\n```console\n$ he goes on\n```\n```sh\nls  # anew\n```\nlest\n"
    assert [hit.split(":")[0] for hit in hits(in_markdown(page))] == ["line 6", "line 1", "line 8"]
    module = 'wish = anew  # whoever\nf"he {wish!r} goes" "on"\n"""First.\n\nIs\n    told: `lest`."""\n'
    assert [hit.split(":")[0] for hit in hits(in_python(module))] == ["line 1", "line 2", "line 5", "line 2"]
