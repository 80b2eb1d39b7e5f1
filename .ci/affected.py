"""What depends on files that changed.

    affected.py BUILD < NAMES              which tests of the quick ring, on two lines: a regular
                                           expression of ctest's, and the files of Python tests;
                                           either may be empty
    affected.py --sources BUILD < NAMES    which C files the build has compiled from such a file

A C test depends on what the build has linked its programs and their libraries from, and on modules
of lib: that of its folder and those whose headers it includes, with all that the table in
lib/README.md lets these include. A script, or a test of a folder that is not a module, depends on
all modules. A file below tests/ that no test is known to depend on concerns all tests of its
folder.

A Python test depends on its own file and on the helpers that it imports. Documents concern the
tests that read documents; any other file concerns all tests.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST_SOURCE = re.compile(r"tests/(?!support/).*\.(c|sh)$")
DOCUMENT = re.compile(r"(?:docs/.*|.*\.md|mkdocs\.yml|LICENSE)$")
# What no C test, and what no Python test, can tell from what it was before.
NOT_OF_C = re.compile(r".*\.py$|bindings/python/|tests/(python|frameworks)/|configs/frameworks/|\.")
NOT_OF_PYTHON = re.compile(r"tests/(?!python/)|\.")


def module_table() -> dict[str, set[str]]:
    """Of each module of lib, all that it reaches, by the table of the source tour."""
    direct: dict[str, set[str]] = {"base": set(), "kernels": {"base"}}
    for line in (ROOT / "lib/README.md").read_text().splitlines():
        row = re.match(r"\| `(\w+)`[^|]*\|([^|]*)\|$", line)
        if row and row[1] not in direct:
            direct[row[1]] = {"base", *re.findall(r"`(\w+)`", row[2])}
            if row[1] != "config":
                direct[row[1]].add("kernels")
    return {
        name: {name}.union(*(direct[one] for one in [name, *used])) for name, used in direct.items()
    }


def module_of(path: str) -> str:
    """The module of lib, or kernels, that a file belongs to; empty: none."""
    parts = path.split("/")
    if parts[0] == "kernels":
        return "kernels"
    return parts[1] if parts[0] == "lib" and len(parts) > 2 and parts[1] != "include" else ""


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Build:
    """What a build folder knows of what was made from what."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).resolve()
        self.sources = self._noted_sources()
        rule = re.compile(r"^build ([^:\n]+): \S*(?:_LINKER_|SYMLINK)\S* ([^\n]*)", re.MULTILINE)
        self.linked = {
            output: inputs.replace("|", " ").split()
            for outputs, inputs in rule.findall((self.folder / "build.ninja").read_text())
            for output in outputs.replace("|", " ").split()
        }

    def _noted_sources(self) -> dict[str, set[str]]:
        """Of each object, the sources and headers of this repository that it was compiled from."""
        found: dict[str, set[str]] = {}
        made = ""
        for line in run("ninja", "-C", str(self.folder), "-t", "deps").splitlines():
            if line.startswith("    "):
                path = os.path.normpath(self.folder / line.strip())
                if path.startswith(f"{ROOT}/"):
                    found[made].add(path.removeprefix(f"{ROOT}/"))
            elif line:
                made = line.split(":")[0]
                found[made] = set()
        return found

    def compiled_from(self, changed: set[str]) -> set[str]:
        """The C sources that were compiled from such a file, which may be a header."""
        compiled = [used for used in self.sources.values() if used & changed]
        return {path for used in compiled for path in used if path.endswith(".c")}

    def made_from(self, outputs: set[str]) -> set[str]:
        """What programs and libraries are made from, but for refit's library; of tests/support what
        they include."""
        found: set[str] = set()
        seen: set[str] = set()
        left = list(outputs)
        while left:
            one = left.pop()
            if one in seen or re.match(r"lib/librefit|tests/librefit_test_support", one):
                continue
            seen.add(one)
            left += self.linked.get(one, [])
            found |= self.sources.get(one, set())
            left += [
                f"tests/CMakeFiles/refit_test_support.dir/support/{Path(path).stem}.c.o"
                for path in self.sources.get(one, ())
                if path.startswith("tests/support/")
            ]
        return found

    def tests(self) -> dict[str, set[str]]:
        """Of each test of the quick ring, the files that it is made from and that it names."""
        listed = run(
            "ctest", "--test-dir", str(self.folder), "--show-only=json-v1", "-LE", "slow|again"
        )
        found = {}
        for test in json.loads(listed)["tests"]:
            words = json.dumps(test)
            named = set(re.findall(rf"{re.escape(str(self.folder))}/([\w./-]+)", words))
            folders = named - {"bin"}
            made = {one for one in self.linked if {one, str(Path(one).parent)} & folders}
            found[test["name"]] = self.made_from(made) | set(
                re.findall(rf"{re.escape(str(ROOT))}/([\w./-]+)", words)
            )
        return found


def folder_of_test(path: str) -> str:
    """`wire` for tests/wire/test_message.c; empty for what tests of all folders share."""
    found = re.match(r"tests/(?!support/)(\w+)/", path)
    return found[1] if found else ""


def c_tests(changed: set[str], build: Build) -> list[str]:
    tests, table = build.tests(), module_table()
    changed = {path for path in changed if not NOT_OF_C.match(path)}
    modules = {module_of(path) for path in changed | build.compiled_from(changed)} - {""}
    unclaimed = changed.difference(*tests.values())
    unclaimed = {path for path in unclaimed if not module_of(path) and not DOCUMENT.match(path)}
    folders = {folder_of_test(path) for path in unclaimed}
    if any(DOCUMENT.match(path) for path in changed):
        folders.add("abi")
    chosen = []
    for name, own in tests.items():
        here = {folder_of_test(path) for path in own if TEST_SOURCE.match(path)}
        used = {module_of(path) for path in own} - {""} | here
        reached = set().union(*(table.get(one, modules) for one in used))
        if "" in folders or folders & here or own & changed or modules & reached:
            chosen.append(name)
    return chosen


def python_tests(changed: set[str]) -> list[str]:
    folder = ROOT / "tests/python"
    files = {one.stem: one.read_text() for one in folder.glob("*.py")}
    touched = set()
    for path in changed:
        if DOCUMENT.match(path):
            touched |= {"test_documents", "test_readme", "test_recipes"}
        elif Path(path).parent == Path("tests/python") and Path(path).stem in {*files} - {
            "conftest"
        }:
            touched.add(Path(path).stem)
        elif path == "tests/kernels/optim_library.c":
            touched.add("test_optim_kernel")
        elif not NOT_OF_PYTHON.match(path):
            touched |= set(files)
    more = True
    while more:
        named = re.compile(rf"^\s*(?:from|import) +(?:{'|'.join(touched) or '$'})\b", re.MULTILINE)
        found = {one for one, text in files.items() if named.search(text)} | touched
        more, touched = found != touched, found
    slow = re.compile(r"^pytestmark = .*\bmark\.slow\b", re.MULTILINE)
    quick = {one for one in touched if one.startswith("test_") and not slow.search(files[one])}
    return sorted(f"tests/python/{one}.py" for one in quick)


def main() -> None:
    *options, folder = sys.argv[1:]
    build = Build(folder)
    changed = {line for line in sys.stdin.read().splitlines() if line}
    if options == ["--sources"]:
        print(*sorted(build.compiled_from(changed)), sep="\n")
        return
    chosen = c_tests(changed, build)
    print(f"^({'|'.join(map(re.escape, chosen))})$" if chosen else "")
    print(*python_tests(changed))


main()
