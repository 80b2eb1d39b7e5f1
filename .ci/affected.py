"""Which tests depend on files that changed: affected.py BUILD < NAMES

Prints two lines: a regular expression of ctest's tests, and the files of Python tests, separated by
blanks; either may be empty. A C test depends on the files that its own objects are compiled from,
as the build has noted them, and on modules of lib: that of its folder and those whose headers it
includes, with all that the table in lib/README.md lets these include. A script, or a test of a
folder that is not a module, depends on all modules. A change of the package, of lib or of kernels
concerns all Python tests; one of the tests' own files concerns those that import it.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = Path(sys.argv[1]).resolve()
TEST_SOURCE = r"tests/(?!support/).*\.(c|sh)$"


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


def noted_sources() -> dict[str, set[str]]:
    """Of each object, the sources and headers of this repository that it was compiled from."""
    found: dict[str, set[str]] = {}
    made = ""
    for line in run("ninja", "-C", str(BUILD), "-t", "deps").splitlines():
        if line.startswith("    "):
            path = os.path.normpath(BUILD / line.strip())
            if path.startswith(f"{ROOT}/"):
                found[made].add(path.removeprefix(f"{ROOT}/"))
        elif line:
            made = line.split(":")[0]
            found[made] = set()
    return found


def linked_objects() -> dict[str, list[str]]:
    """Of each program, its own objects: those that no archive brings."""
    rules = re.findall(
        r"^build (bin/\S+): \S+ ([^|\n]*)", (BUILD / "build.ninja").read_text(), re.MULTILINE
    )
    return {name: inputs.split() for name, inputs in rules}


def compiled_from(
    program: str, objects: dict[str, list[str]], sources: dict[str, set[str]]
) -> set[str]:
    """What the program's own objects are made from, and those of tests/support that they call."""
    found: set[str] = set()
    left = [sources.get(one, set()) for one in objects.get(program, [])]
    while left:
        new = left.pop() - found
        found |= new
        for path in new:
            support = f"tests/CMakeFiles/refit_test_support.dir/support/{Path(path).stem}.c.o"
            if path.startswith("tests/support/") and support in sources:
                left.append(sources[support])
    return found


def c_tests(changed: set[str], table: dict[str, set[str]]) -> list[str]:
    listed = json.loads(run("ctest", "--test-dir", str(BUILD), "--show-only=json-v1"))["tests"]
    sources, objects = noted_sources(), linked_objects()
    modules = {module_of(path) for path in changed} - {""}
    everything = any(Path(path).name in ("CMakeLists.txt", "CMakePresets.json") for path in changed)
    public = any(path.startswith("lib/include/") for path in changed)
    chosen = []
    for test in listed:
        words = json.dumps(test)
        programs = set(re.findall(rf"{re.escape(str(BUILD))}/(bin/[\w-]+)", words))
        own = set(re.findall(rf"{re.escape(str(ROOT))}/([\w./-]+)", words))
        for program in programs:
            own |= compiled_from(program, objects, sources)
        folders = {path.split("/")[1] for path in own if re.match(TEST_SOURCE, path)}
        used = {module_of(path) for path in own} - {""} | folders
        reached = set().union(*(table.get(one, modules) for one in used))
        if everything or own & changed or modules & reached or (public and programs):
            chosen.append(test["name"])
    return chosen


def python_tests(changed: set[str]) -> list[str]:
    folder = ROOT / "tests/python"
    tests = sorted(folder.glob("test_*.py"))
    wide = (
        "bindings/python/",
        "lib/",
        "kernels/",
        "tests/python/conftest.py",
        "tests/python/pytest.ini",
    )
    if any(path.startswith(wide) for path in changed):
        return [str(one.relative_to(ROOT)) for one in tests]
    touched = {Path(path).stem for path in changed if Path(path).parent == Path("tests/python")}
    helpers = {one: one.read_text() for one in folder.glob("*.py")}
    more = True
    while more:
        named = re.compile(rf"^\s*(?:from|import) +(?:{'|'.join(touched) or '$'})\b", re.MULTILINE)
        found = {one.stem for one, text in helpers.items() if named.search(text)} | touched
        more, touched = found != touched, found
    return [str(one.relative_to(ROOT)) for one in tests if one.stem in touched]


def main() -> None:
    changed = {line for line in sys.stdin.read().splitlines() if line}
    chosen = c_tests(changed, module_table())
    print(f"^({'|'.join(map(re.escape, chosen))})$" if chosen else "")
    print(*python_tests(changed))


main()
