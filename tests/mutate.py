"""Changes one place of the library at a time and tells which changes the fast C tests let pass.

All that is built lies in a copy of the tree, which is removed at the end, however that comes. A
mutant that does not compile, or whose object file is the original's byte by byte, is not counted.
The tests of the mutated file's own folder come first, then all others, until one fails.
"""

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = "slow|source|again"
LEAST_SECONDS = 20  # of a test, before it counts as hung
TIMEOUT = 10  # times as long as without a change
LONGEST_FILE = 4 << 30  # bytes

SWAPPED = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "&&": "||",
    "||": "&&",
    "+": "-",
    "-": "+",
    "+=": "-=",
    "-=": "+=",
}
OPERATOR = re.compile(r"(?<= )(<=?|>=?|[=!]=|&&|\|\||[-+]=?)(?= |$)")
CONSTANT = re.compile(r"(?<![\w.{])(\d+)(?=[uU]?[lL]{0,2}\b)(?![\w.]*\.)")
TRUTH = re.compile(r"\b(true|false)\b")
STATUS = re.compile(r"^( +return )(REFIT_\w+)(;)$")
CALL = re.compile(r"^ +(?:\(void\))?[a-z]\w*(?:(?:->|\.)\w+)*\(.*\);$")
ASSIGNMENT = re.compile(r"^ +\**[a-z]\w*(?:(?:->|\.)\w+|\[[^]]*\])* (?:[-+*/|&^%]|<<|>>)?= .*;$")
COUNTED = re.compile(r"^ +\**[a-z]\w*(?:(?:->|\.)\w+|\[[^]]*\])*(?:\+\+|--);$")
KEYWORD = re.compile(r"^ +(?:return|if|while|for|switch|case|goto|do|else|sizeof)\b")
RETURNS = re.compile(r"^( +)if \(.*\) (?:return\b.*|break|continue|goto \w+);$")


@dataclass(frozen=True)
class Mutant:
    """One line of one file as it is, and as it is to be."""

    path: str
    line: int
    old: str
    new: str


def mask(text: str) -> list[str]:
    """The lines, with blanks in place of comments, of what is quoted and of what is for the
    preprocessor."""
    parts = r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|^#(?:[^\n]*\\\n)*[^\n]*"
    blank = re.sub(
        parts, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.DOTALL | re.MULTILINE
    )
    return blank.split("\n")


def replaced(line: str, start: int, end: int, by: str) -> str:
    return line[:start] + by + line[end:]


def closing(line: str, opened: int) -> int:
    """Where the parenthesis ends that begins there; -1 if not in this line."""
    depth = 0
    for at in range(opened, len(line)):
        depth += {"(": 1, ")": -1}.get(line[at], 0)
        if depth == 0:
            return at
    return -1


def swaps(line: str, plain: str) -> list[str]:
    found = [
        replaced(line, *hit.span(1), SWAPPED[hit[1]])
        for hit in OPERATOR.finditer(plain)
        if plain[: hit.start()].strip()
    ]
    for hit in CONSTANT.finditer(plain):
        number = int(hit[1])
        others = {number + 1, 1 - number if number < 2 else number - 1}
        found += [replaced(line, *hit.span(1), str(other)) for other in sorted(others)]
    for hit in TRUTH.finditer(plain):
        found.append(replaced(line, *hit.span(), "false" if hit[0] == "true" else "true"))
    return found


def negations(line: str, plain: str) -> list[str]:
    hit = re.search(r"\bif \(", plain)
    if hit is None:
        return []
    end = closing(plain, hit.end() - 1)
    if end < 0:
        return []
    return [f"{line[: hit.end()]}!({line[hit.end() : end]}){line[end:]}"]


def drops(line: str, plain: str) -> list[str]:
    whole = plain.count("(") == plain.count(")")
    indent = re.match(r" *", line)[0]
    statement = any(kind.match(plain) for kind in (CALL, ASSIGNMENT, COUNTED))
    if whole and not KEYWORD.match(plain) and "RFT_TRY" not in plain and statement:
        return [indent + ";"]
    if whole and RETURNS.match(plain):
        return [indent + ";"]
    if re.match(r"^ +RFT_TRY\(.*\);$", plain) and whole:
        return [re.sub(r"RFT_TRY\((.*)\);$", r"(void)(\1);", line)]
    if re.match(r"^ +RFT_REFUSE_IF\(", plain):
        return [line.replace("RFT_REFUSE_IF(", "RFT_REFUSE_IF(true ? false : ", 1).rstrip()]
    return []


def statuses(line: str, plain: str) -> list[str]:
    hit = STATUS.match(plain)
    if hit is None:
        return []
    other = "REFIT_ERR_SYSTEM" if hit[2] == "REFIT_OK" else "REFIT_OK"
    return [hit[1] + other + hit[3]]


def changes(line: str, plain: str) -> list[str]:
    """What can become of a line, each a change of one place."""
    if not plain.startswith("    ") or not plain.strip():
        return []
    makers = (swaps, negations, drops, statuses)
    return [new for maker in makers for new in maker(line, plain) if new != line]


def sources(folders: list[str]) -> list[str]:
    found = [path for folder in folders for path in (ROOT / folder).rglob("*.c")]
    names = {str(path.relative_to(ROOT)) for path in found}
    return sorted(names)


def draw(folders: list[str], seed: int) -> list[Mutant]:
    """All lines that can be changed, in the order of the seed, each with one of its changes."""
    chance = random.Random(seed)
    places = []
    for path in sources(folders):
        text = (ROOT / path).read_text()
        for number, (line, plain) in enumerate(zip(text.split("\n"), mask(text), strict=True), 1):
            options = changes(line, plain)
            if options:
                places.append((path, number, line, options))
    chance.shuffle(places)
    return [Mutant(path, at, line, chance.choice(options)) for path, at, line, options in places]


def show(mutant: Mutant) -> str:
    return f"{mutant.path}:{mutant.line}\n-{mutant.old}\n+{mutant.new}"


class Failed(Exception):
    """The tool cannot go on, and why."""


class Copy:
    """The tree as it is, built in a folder of its own."""

    def __init__(self, folder: Path, jobs: int, seed: int) -> None:
        self.tree = folder / "tree"
        self.build = folder / "build"
        self.jobs = str(jobs)
        self.environment = dict(
            os.environ,
            CCACHE_BASEDIR=str(folder),
            CCACHE_NOHASHDIR="1",
            TEST_SEED=str(seed),  # the samples of the tests
        )

    def run(self, *command: str, stop_after: float | None = None) -> tuple[int, str]:
        """Ends the command and its children when this process is told to end."""
        child = subprocess.Popen(
            command, cwd=self.tree, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = child.communicate(timeout=stop_after)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return child.returncode, output

    def take_tree(self) -> None:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if os.path.lexists(ROOT / name):
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.tree / name, follow_symlinks=False)

    def make(self, *targets: str) -> bool:
        targets = targets or ("all",)
        return self.run("ninja", "-C", str(self.build), "-j", self.jobs, *targets)[0] == 0

    def configure(self) -> None:
        launcher = ["-DCMAKE_C_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
        status, output = self.run(
            "cmake", "-G", "Ninja", "-S", str(self.tree), "-B", str(self.build),
            "-DREFIT_BUILD_TESTS=ON", "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O2 -DNDEBUG", *launcher,
        )  # fmt: skip
        if status != 0:
            raise Failed(f"the copy cannot be configured:\n{output}")
        commands = json.loads((self.build / "compile_commands.json").read_text())
        self.objects = {}
        for entry in commands:
            made = re.search(r" -o (\S*refit_objects\.dir\S*)", entry["command"])
            if made is not None:
                self.objects[str(Path(entry["file"]).relative_to(self.tree))] = made[1]

    def ctest(self, folder: str, *options: str) -> tuple[int, str]:
        return self.run(
            "ctest", "--test-dir", str(self.build / folder), "-LE", SKIPPED, "-j", self.jobs,
            "--stop-on-failure", *options,
        )  # fmt: skip

    def list_tests(self, folder: str) -> list[str]:
        if not (self.build / folder).is_dir():
            return []
        return re.findall(r"^ *Test +#\d+: (\S+)$", self.ctest(folder, "-N")[1], re.MULTILINE)

    def measure(self) -> None:
        """Without a change all pass; and no test may take much longer with one."""
        status, output = self.ctest("", "--timeout", "600")
        if status != 0:
            raise Failed(f"without a change not all tests pass:\n{output[-4000:]}")
        taken = {
            name: float(seconds)
            for name, seconds in re.findall(r"#\d+: (\S+) \.+ +\w+ +([\d.]+) sec", output)
        }
        for listing in self.build.rglob("CTestTestfile.cmake"):
            text = listing.read_text()

            def limit(found: re.Match[str]) -> str:
                seconds = taken.get(found[2])
                if seconds is None:
                    return found[0]
                most = int(max(LEAST_SECONDS, TIMEOUT * seconds))
                return f'{found[1]}TIMEOUT "{min(int(found[3]), most)}"'

            pattern = r'(set_tests_properties\((\S+) PROPERTIES [^\n]*?)TIMEOUT "(\d+)"'
            listing.write_text(re.sub(pattern, limit, text))


class Hunt:
    """Mutants one after another, and what became of them."""

    def __init__(self, copy: Copy) -> None:
        self.copy = copy
        self.sums: Counter[str] = Counter()

    def result_of_tests(self, mutant: Mutant) -> str:
        """Which test notices it; empty: none."""
        room = Path(mutant.path).parent.name
        folder = f"tests/{room}"
        own = self.copy.list_tests(folder)
        namesakes = [name for name in own if name.startswith(Path(mutant.path).stem)]
        rest = [name for name in own if name not in namesakes]
        built = f"the build of {folder}"
        steps = [
            (folder, namesakes, [f"test_{name}" for name in namesakes]),
            (folder, rest, [f"{folder}/all"]),
            ("", [], ["all"]),
        ]
        for where, names, targets in steps:
            if where and not names:
                continue
            known = [target for target in targets if not target.startswith("test_cuda_")]
            if not self.copy.make(*known):
                return built
            chosen = ["-R" if where else "-E", f"^({'|'.join(names or own)})$"]
            status, output = self.copy.ctest(where, *chosen)
            if status != 0:
                failed = re.search(r"#\d+: (\S+) \.*\**(\w+)", output[output.find("***") - 80 :])
                return " ".join(failed.groups()) if failed else "a test"
        return ""

    def judge(self, mutant: Mutant) -> str:
        """What becomes of one: noticed, survived, no code or the same code."""
        target = self.copy.objects[mutant.path]
        built = self.copy.build / target
        if not self.copy.make(target):
            raise Failed(f"{mutant.path} does not compile without a change")
        original = built.read_bytes()
        source = self.copy.tree / mutant.path
        text = source.read_text()
        lines = text.split("\n")
        lines[mutant.line - 1] = mutant.new
        source.write_text("\n".join(lines))
        try:
            if not self.copy.make(target):
                return "does not compile"
            if built.read_bytes() == original:
                return "is the same code"
            by = self.result_of_tests(mutant)
            return f"noticed by {by}" if by else "survived"
        finally:
            source.write_text(text)

    def go(self, mutants: list[Mutant], count: int) -> None:
        survivors = []
        for mutant in mutants:
            if self.sums["counted"] == count:
                break
            result = self.judge(mutant)
            counts = result.startswith("noticed") or result == "survived"
            self.sums["counted"] += counts
            self.sums[result.split(" by ")[0]] += 1
            self.sums["by time"] += result.endswith("Timeout")
            if counts:
                place = f"{mutant.path}:{mutant.line}"
                print(f"{self.sums['counted']:4} {place} {result}", flush=True)
            if result == "survived":
                survivors.append(mutant)
                print(f"-{mutant.old}\n+{mutant.new}", flush=True)
        self.report(survivors)

    def report(self, survivors: list[Mutant]) -> None:
        if survivors:
            print("\nno test has noticed:\n")
        for mutant in survivors:
            print(show(mutant) + "\n")
        counted, noticed = self.sums["counted"], self.sums["noticed"]
        share = 100 * noticed / counted if counted else 0
        print(
            f"{counted} mutants: {noticed} noticed ({share:.0f} %), {self.sums['by time']} of them "
            f"because a test took too long; {self.sums['survived']} not. Not counted: "
            f"{self.sums['does not compile']} that do not compile, "
            f"{self.sums['is the same code']} that are the same code."
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests/mutate.sh", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which mutants (default: %(default)s)")
    parser.add_argument("--count", type=int, default=100, help="how many (default: %(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="compilers and tests at a time"
    )
    parser.add_argument(
        "--list", action="store_true", help="print the first COUNT places of the seed, and end"
    )
    parser.add_argument(
        "folders", nargs="*", default=["lib", "kernels"], metavar="FOLDER",
        help="where changes are made, such as lib/wire (default: lib kernels)",
    )  # fmt: skip
    return parser.parse_args()


def guard_the_machine() -> None:
    """A mutant that takes memory or room without end harms nothing else."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if hard == resource.RLIM_INFINITY or hard > LONGEST_FILE:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, hard))
    Path("/proc/self/oom_score_adj").write_text("1000")


def end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def main() -> int:
    options = parse()
    mutants = draw(options.folders, options.seed)
    if not mutants:
        print(f"nothing to change in {' '.join(options.folders)}", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(show(mutant) for mutant in mutants[: options.count]))
        return 0
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)
    guard_the_machine()
    with tempfile.TemporaryDirectory(prefix="refit-mutate-") as folder:
        copy = Copy(Path(folder), options.jobs, options.seed)
        print(f"building a copy in {folder} ...", flush=True)
        try:
            copy.take_tree()
            copy.configure()
            if not copy.make():
                raise Failed("the copy cannot be built")
            copy.measure()
            print(f"seed {options.seed}, out of {len(mutants)} lines that can be changed")
            Hunt(copy).go(mutants, options.count)
        except Failed as why:
            print(why, file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
