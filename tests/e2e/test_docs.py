"""The documents are true: their commands run, their links lead somewhere, their text is short.

Commands: the fenced blocks of README.md, docs/guide and docs/reference run from top to bottom, a
page after the other, as somebody would type them. Each page has a runtime folder of its own and a
folder in which the repository's files are found. What a block leaves running is waited for and must
end well, too. The words behind three backquotes say what a block is:

    sh                          commands
    console                     commands behind `$ `, and their output, which is not compared
    sh no-run: REASON           commands that are not run; they are listed with the reason
    sh needs: root, PROGRAM     run where this user is root and has the program, else skipped
    sh two-machines             two lines, each run in a network namespace of its own

Commands in the text (`unbroken …` in backquotes) are asked for their help, so a subcommand or an
option that does not exist is found.
"""

import os
import re
import shlex
import shutil
import statistics
import subprocess
import tempfile
from pathlib import Path

import pytest

from lib.fabric import UNBROKEN, Fabric
from lib.namespaces import Namespaces
from lib.paths import BUILD, ROOT
from lib.process import Failure

README = ROOT / "README.md"
PROMISES = ROOT / "docs" / "promises.md"
README_BYTES, README_LINES = 8000, 120
COLUMNS = 100
# Where the widths of code are looked at.
CODE = ("include", "tests", "benches", "crates", "python")
SENTENCE_WORDS = 25
BLOCK_SECONDS = 240
HELP_SECONDS = 20
# Files and folders of the repository that a path in backquotes begins with.
TOP = "crates|tests|docs|include|benches|python|fuzz|xtask"
# What the documents name before the files that it stands for are built.
BUILT = re.compile(r"^(target|docs/figures/[\w<>*-]+\.)")
WAIT_FOR_ALL = "for job in $(jobs -p); do wait $job; done"


class Block:
    """A fenced block of a page: what it says of itself, and its commands."""

    def __init__(self, page: Path, line: int, info: str, lines: list):
        self.page, self.line, self.lines = page, line, lines
        self.language, _, mark = info.partition(" ")
        word, _, rest = mark.partition(":")
        self.not_run = rest.strip() if word == "no-run" else None
        self.needs = [n.strip() for n in rest.split(",")] if word == "needs" else []
        self.two_machines = mark == "two-machines"
        if mark and not (rest or self.two_machines):
            raise Failure(f"{self.where()}: '{info}' is no mark: see {__file__}")

    def where(self) -> str:
        """The page and the line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list:
        """Its lines, or where it shows a session, what is typed."""
        if self.language != "console":
            return self.lines
        return [line[2:] for line in self.lines if line.startswith("$ ")]

    def missing(self) -> list:
        """What it needs and this machine has not."""
        root = os.geteuid() == 0
        return [n for n in self.needs if (not root if n == "root" else not shutil.which(n))]


def pages(*patterns: str) -> list:
    """Markdown files below the root."""
    return [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]


def documents() -> list:
    """All of them: those of the root, docs, the crates' folders and so on."""
    folders = ("docs", "crates", "python", "tests", ".github")
    return pages("*.md", *(f"{folder}/**/*.md" for folder in folders))


def blocks(page: Path) -> list:
    """The fenced blocks of commands of a page."""
    found, inside = [], None
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if not line.startswith("```"):
            if inside:
                inside[2].append(line)
        elif inside:
            if inside[1].split(" ")[0] in ("sh", "console"):
                found.append(Block(page, *inside))
            inside = None
        else:
            inside = (number, line[3:].strip(), [])
    return found


def prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def inline(page: Path) -> list:
    """The `unbroken` commands in the text; `…` stands for what a reader would put there."""
    found = re.findall(r"`(unbroken [^`]*)`", prose(page))
    return [command for command in dict.fromkeys(found) if "…" not in command]


class Reader:
    """Somebody who reads a page from top to bottom, and types."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self.folder = Path(tempfile.mkdtemp(prefix="unbroken-readme-"))
        for entry in ROOT.iterdir():
            if not entry.name.startswith(".") and entry.name != "target":
                (self.folder / entry.name).symlink_to(entry)
        (self.folder / "target").mkdir()
        (self.folder / "target" / "release").symlink_to(BUILD)
        self.env = {"PATH": f"{BUILD}:{os.environ['PATH']}"}
        if os.geteuid() == 0:
            # As the page says where it speaks of Open MPI.
            self.env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    def leave(self):
        """Removes what was made."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def type(self, name: str, lines: list):
        """Runs lines in one shell."""
        # make and cargo are for the folder of the project; what else there is makes files.
        project = any(re.match(r"(make|cargo) ", line) for line in lines)
        script = ["set -e", f"cd '{ROOT if project else self.folder}'", *lines, WAIT_FOR_ALL]
        # What is not done in time is ended with all that it has started.
        line = ["timeout", BLOCK_SECONDS, "bash", "-c", "\n".join(script)]
        shell = self.fabric.start(name, line, self.env)
        shell.expect_success(BLOCK_SECONDS + 20)

    def payload(self) -> int:
        """Payload that the NICs have carried."""
        return sum(nic["rx_payload_bytes"] for nic in self.fabric.nics().values())

    def block(self, block: Block):
        """A block; programs on hosts must have sent something."""
        name = re.sub(r"\W+", "-", block.where())
        commands = block.commands()
        text = "\n".join(commands)
        if block.two_machines:
            return self.two_machines(name, commands)
        if "fabric up" in text:
            # "end what runs, then `unbroken fabric down`, if there is one already"
            self.type(f"{name}-before", ["unbroken fabric down"])
        before = 0 if "fabric up" in text else self.payload()
        self.type(name, commands)
        if "--host a " in text and self.payload() <= before:
            raise Failure("the NICs carried nothing")

    def two_machines(self, name: str, lines: list):
        """Lines for two machines, each in a namespace with the addresses that it names."""
        if len(lines) != 2:
            raise Failure(f"there is a line for each of two machines, not {lines}")
        listener, caller = (line.split("#")[0].strip() for line in lines)
        with Namespaces(octet=0) as net:
            a, b = (" ".join(net.within(host)) for host in "ab")
            self.type(name, [f"{a} {listener} &", "sleep 1", f"{b} {caller}"])


def pages_with(found) -> list:
    """Pages of which `found` gives something, as parameters."""
    return [pytest.param(p, id=str(p.relative_to(ROOT))) for p in documents() if found(p)]


def is_run(page: Path) -> bool:
    """Whether the commands of a page are run: README's, and those of the guide and reference."""
    return page == README or page.parent.name in ("guide", "reference")


@pytest.mark.parametrize("page", pages_with(lambda p: is_run(p) and blocks(p)))
@pytest.mark.timeout(1200)
def test_commands(logs, note, page):
    """The commands of a page, one block after the other."""
    left_out = []
    with Fabric(logs) as fabric:
        reader = Reader(fabric)
        try:
            for block in blocks(page):
                missing = block.missing()
                if block.not_run is not None:
                    left_out.append(f"{block.where()}: {block.not_run}")
                elif missing:
                    left_out.append(f"{block.where()}: needs {', '.join(missing)}")
                else:
                    reader.block(block)
        finally:
            reader.leave()
    if left_out:
        note("not run: " + "; ".join(left_out))


@pytest.mark.smoke
@pytest.mark.parametrize("page", pages_with(inline))
def test_commands_in_the_text(page):
    """They have the subcommands and options that they are written with."""
    for command in inline(page):
        words = shlex.split(command.split(" -- ")[0])[1:]
        line = [str(UNBROKEN), *words, *([] if words == ["help"] else ["--help"])]
        done = subprocess.run(line, capture_output=True, text=True, timeout=HELP_SECONDS)
        if done.returncode != 0:
            raise Failure(f"`{command}`: {done.stderr.strip()}")


def anchors(page: Path) -> set:
    """The names of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).replace("`", "") for h in headings]
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in plain}


@pytest.mark.smoke
def test_links():
    """Links lead to files and headings that are there, and so do paths in backquotes."""
    broken = []
    for page in documents():
        text, name = prose(page), page.relative_to(ROOT)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                broken.append(f"{name}: {link}: no such file")
            elif anchor and anchor not in anchors(target):
                broken.append(f"{name}: {link}: no such heading")
        for path in re.findall(rf"`((?:{TOP})/[^`\s]+)`", text):
            if not (BUILT.match(path) or "<" in path or list(ROOT.glob(path.rstrip("/")))):
                broken.append(f"{name}: `{path}`: no such file")
    broken += mentions()
    if broken:
        raise Failure("\n  ".join([f"{len(broken)} lead nowhere:", *broken]))


def mentions() -> list:
    """Pages that other files name and that are not there."""
    broken = []
    suffixes = {".rs", ".py", ".sh", ".h", ".c", ".toml", ".supp", ".md", ""}
    folders = [ROOT / folder for folder in TOP.split("|")]
    files = [path for folder in folders for path in folder.rglob("*")]
    for path in [*files, ROOT / "Makefile"]:
        if path.suffix not in suffixes or not path.is_file() or "target" in path.parts:
            continue
        text = path.read_text(errors="replace")
        for named in set(re.findall(r"\bdocs/[\w/.-]+\.(?:md|supp)\b", text)):
            if not (ROOT / named).exists():
                broken.append(f"{path.relative_to(ROOT)}: {named}: no such file")
    return broken


@pytest.mark.smoke
def test_short():
    """README fits; half of the sentences of each page have at most 25 words; lines fit, too."""
    wrong = []
    size, lines = README.stat().st_size, len(README.read_text().splitlines())
    if size > README_BYTES or lines > README_LINES:
        wrong.append(f"README.md: {size} bytes, {lines} lines")
    for page in documents():
        text, name = prose(page), page.relative_to(ROOT)
        for line in text.splitlines():
            # A word that is longer, and tables, cannot be broken.
            if len(line) > COLUMNS and not line.startswith(("|", "!", "#")) and "](" not in line:
                wrong.append(f"{name}: {len(line)} columns: {line[:40]}…")
        kept = [line for line in text.splitlines() if not line.startswith(("|", "#", "!"))]
        sentences = re.split(r"(?<=[.:!?])\s+|\n\s*\n|\n\s*[-*] ", "\n".join(kept))
        words = [len(sentence.split()) for sentence in sentences if sentence.split()]
        if words and (median := statistics.median(words)) > SENTENCE_WORDS:
            wrong.append(f"{name}: {median:g} words in the median sentence")
    if wrong:
        raise Failure("\n  ".join(["too long:", *wrong]))


@pytest.mark.smoke
def test_widths():
    """Lines of C and Python have at most 100 columns, but for tables, and no tabs; `clang-format`
    says where to break one of C."""
    sources = []
    for kind in ("h", "c", "py"):
        found = [page for folder in CODE for page in pages(f"{folder}/**/*.{kind}")]
        if not found:
            raise Failure(f"there is no *.{kind} under {', '.join(CODE)}")
        sources += found
    wrong = []
    for source in sources:
        for number, line in enumerate(source.read_text().splitlines(), 1):
            where = f"{source.relative_to(ROOT)}:{number}"
            if len(line) > COLUMNS and not line.startswith("|"):
                wrong.append(f"{where}: {len(line)} columns")
            if "\t" in line:
                wrong.append(f"{where}: a tab")
    if wrong:
        raise Failure("\n  ".join(["too wide:", *wrong]))


@pytest.mark.smoke
def test_promises():
    """Each promise names a test file, and a case that is in it; or says that it is not tested."""
    lines = re.findall(r"^\|(?! promise \|| ---).*\|$", PROMISES.read_text(), flags=re.M)
    if not lines:
        raise Failure(f"{PROMISES} has no table of promises")
    for line in lines:
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if len(cells) != 4:
            raise Failure(f"{PROMISES.name}: {line}: four cells are right")
        path, case = cells[2].strip("`"), cells[3].strip("`")
        if path == "not tested":
            continue
        if not (ROOT / path).is_file():
            raise Failure(f"{PROMISES.name}: {path}: no such file")
        # A function, or the name of a case in quotes.
        name = re.escape(case)
        if not re.search(rf"(def|fn) {name}\b|\"{name}", (ROOT / path).read_text()):
            raise Failure(f"{PROMISES.name}: {path} has no case '{case}'")
