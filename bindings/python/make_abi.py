#!/usr/bin/env python3
"""Writes src/refit/_c/abi.py, the door of the C library in the words of ctypes, from its headers.

    bindings/python/make_abi.py            writes the file
    bindings/python/make_abi.py --check    says whether it is what the headers say; exit 1: no

The preprocessor (cc, or what CC names) expands the headers; what is left of refit's own files is a
plain list of enums, structs, function pointers and functions, in one style, which is read here,
as are macros that are numbers.
What does not fit that style ends the script: nothing is passed over. That sizes, offsets and
numbers are what a compiler makes of them is proved by tests/python/test_abi.py, with a probe.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = HERE.parents[1] / "lib" / "include"
TARGET = HERE / "src" / "refit" / "_c" / "abi.py"

SCALARS = {
    "char": "c_char",
    "signed char": "c_byte",
    "unsigned char": "c_ubyte",
    "int": "c_int",
    "unsigned int": "c_uint",
    "unsigned": "c_uint",
    "long long": "c_longlong",
    "size_t": "c_size_t",
    "ptrdiff_t": "c_ssize_t",
    "uint8_t": "c_uint8",
    "uint16_t": "c_uint16",
    "uint32_t": "c_uint32",
    "uint64_t": "c_uint64",
    "int32_t": "c_int32",
    "int64_t": "c_int64",
    "float": "c_float",
    "double": "c_double",
    "refit_region_id": "c_uint32",
    "refit_activation_group": "c_uint64",
}

HEAD = '''"""The C library's door for ctypes. Made by make_abi.py from lib/include; do not edit."""

from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
{imports}
)
from typing import Any, Final

'''


LIMITS = {"UINT32_MAX": str(2**32 - 1), "UINT64_MAX": str(2**64 - 1)}


def preprocess() -> tuple[str, dict[str, str]]:
    """What the preprocessor leaves of refit's own headers, on one line; and its numeric macros."""
    command = [*os.environ.get("CC", "cc").split(), "-E", "-dD", f"-I{HEADERS}", "-x", "c", "-"]
    advanced = sorted(path.name for path in (HEADERS / "refit" / "advanced").glob("*.h"))
    includes = ["refit.h", *(f"refit/advanced/{name}" for name in advanced)]
    source = "".join(f"#include <{path}>\n" for path in includes)
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    kept: list[str] = []
    macros: dict[str, str] = {}
    ours = False
    for line in text.splitlines():
        marker = re.match(r'# \d+ "(.*?)"', line)
        if marker:
            ours = marker[1].startswith(str(HEADERS))
        elif ours and line.startswith("#"):
            if match := re.fullmatch(r"#define (REFIT_\w+) (\d+|UINT(?:32|64)_MAX)", line):
                macros[match[1]] = LIMITS.get(match[2], match[2])
        elif ours:
            kept.append(line)
    text = re.sub(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)", " ", " ".join(kept))
    return re.sub(r"\s+", " ", text), macros


def declarations(text: str) -> list[str]:
    """Cuts at the semicolons outside braces."""
    out, depth, start = [], 0, 0
    for at, char in enumerate(text):
        depth += {"{": 1, "}": -1}.get(char, 0)
        if char == ";" and depth == 0:
            out.append(text[start:at].strip())
            start = at + 1
    rest = text[start:].strip()
    if rest:
        raise SystemExit(f"make_abi: what is this? {rest[:80]}")
    return [one for one in out if one]


def natural(name: str) -> list[str | int]:
    """The order in which ruff sorts imports: numbers as numbers."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Abi:
    """What has been read so far, and the Python text that says it."""

    def __init__(self) -> None:
        self.enums: set[str] = set()
        self.structs: set[str] = set()
        self.opaque: set[str] = set()
        self.functions: set[str] = set()
        self.constants: list[str] = []
        self.bodies: list[str] = []
        self.prototypes: list[str] = []
        self.used: set[str] = set()

    def scalar(self, name: str) -> str:
        self.used.add(name)
        return name

    def type_of(self, text: str) -> str:
        """A C type as ctypes names it; None stands for void."""
        text = re.sub(r"\bconst\b|\bstruct\b|\benum\b", "", text)
        stars = text.count("*")
        base = " ".join(text.replace("*", " ").split())
        if base == "void":
            return "None" if stars == 0 else self.pointers(self.scalar("c_void_p"), stars - 1)
        if base == "char" and stars:
            return self.pointers(self.scalar("c_char_p"), stars - 1)
        if base in SCALARS:
            return self.pointers(self.scalar(SCALARS[base]), stars)
        if base in self.enums:
            return self.pointers(self.scalar("c_int"), stars)
        if base in self.opaque and stars:
            return self.pointers(self.scalar("c_void_p"), stars - 1)
        if base in self.structs or (base in self.functions and stars == 0):
            return self.pointers(base, stars)
        raise SystemExit(f"make_abi: a type that it does not know: {text!r}")

    @staticmethod
    def pointers(base: str, stars: int) -> str:
        for _ in range(stars):
            base = f"POINTER({base})"
        return base

    def argument(self, text: str) -> tuple[str, str]:
        """A declared name and its type."""
        pointer = re.fullmatch(r"(.*?)\(\*\s*(\w+)\)\s*\((.*)\)", text)
        if pointer:
            return pointer[2], self.function_type(pointer[1], pointer[3])
        match = re.fullmatch(r"(.*?[\s*])(\w+)\s*((?:\[\s*\w+\s*\])?)", text.strip())
        if not match:
            raise SystemExit(f"make_abi: a field or argument that it cannot read: {text!r}")
        kind = self.type_of(match[1])
        if match[3]:
            kind = f"{kind} * {int(match[3].strip('[] '))}"
        return match[2], kind

    def function_type(self, result: str, arguments: str) -> str:
        kinds = [self.type_of(result)]
        if arguments.strip() != "void":
            kinds += [self.argument(one)[1] for one in re.split(r",(?![^(]*\))", arguments)]
        return f"CFUNCTYPE({', '.join(kinds)})"

    def enum(self, body: str, name: str) -> None:
        self.enums.add(name)
        value = -1
        for entry in filter(None, (one.strip() for one in body.split(","))):
            match = re.fullmatch(r"(\w+)\s*(?:=\s*\(?\s*(-?\d+)\s*\)?)?", entry)
            if not match:
                raise SystemExit(f"make_abi: an enum's entry that it cannot read: {entry!r}")
            value = int(match[2]) if match[2] is not None else value + 1
            self.constants.append(f"{match[1]}: Final = {value}")

    def struct(self, body: str, name: str) -> None:
        fields = [self.argument(one.strip()) for one in body.split(";") if one.strip()]
        rows = "".join(f'        ("{field}", {kind}),\n' for field, kind in fields)
        self.structs.add(name)
        self.opaque.discard(name)
        # Without slots ctypes takes an attribute of any name, and C never sees it.
        head = f"class {name}(Structure):\n    __slots__ = ()\n"
        self.bodies.append(f"{head}    _fields_ = [\n{rows}    ]\n")

    def function(self, result: str, name: str, arguments: str) -> None:
        kinds = (
            []
            if arguments.strip() == "void"
            else [self.argument(one)[1] for one in re.split(r",(?![^(]*\))", arguments)]
        )
        row = "".join(f"        {kind},\n" for kind in kinds)
        row = f"[\n{row}    ]" if kinds else "[]"
        self.prototypes.append(f'    "{name}": ({self.type_of(result)}, {row}),\n')

    def read(self, text: str) -> None:
        if match := re.fullmatch(r"typedef enum \w+ \{(.*)\} (\w+)", text):
            self.enum(match[1], match[2])
        elif match := re.fullmatch(r"typedef struct \w+ \{(.*)\} (\w+)", text):
            self.struct(match[1], match[2])
        elif match := re.fullmatch(r"typedef struct (\w+) (\w+)", text):
            self.opaque.add(match[2])
        elif match := re.fullmatch(r"typedef (.*?)\(\*\s*(\w+)\)\s*\((.*)\)", text):
            self.bodies.append(f"{match[2]} = {self.function_type(match[1], match[3])}\n")
            self.functions.add(match[2])
        elif match := re.fullmatch(r"typedef uint(?:32|64)_t (\w+)", text):
            if match[1] not in SCALARS:
                raise SystemExit(f"make_abi: add {match[1]} to SCALARS")
        elif match := re.fullmatch(r"(.*?[\s*])(refit_\w+)\s*\((.*)\)", text):
            self.function(match[1], match[2], match[3])
        else:
            raise SystemExit(f"make_abi: a declaration that it cannot read: {text[:120]!r}")

    def text(self) -> str:
        imports = "\n".join(f"    {name}," for name in sorted(self.used, key=natural))
        return (
            HEAD.format(imports=imports)
            + "\n".join(self.constants)
            + "\n\n\n"
            + "\n\n".join(self.bodies)
            + "\n\n# What each function returns, and what it takes.\n"
            + "PROTOTYPES: Final[dict[str, tuple[Any, list[Any]]]] = {\n"
            + "".join(self.prototypes)
            + "}\n"
        )


def main() -> int:
    abi = Abi()
    text, macros = preprocess()
    for one in declarations(text):
        abi.read(one)
    abi.constants += [f"{name}: Final = {value}" for name, value in macros.items()]
    text = abi.text()
    if sys.argv[1:] == ["--check"]:
        fresh = TARGET.exists() and TARGET.read_text() == text
        print(
            "the same" if fresh else f"{TARGET.name} is not what the headers say: run make_abi.py"
        )
        return 0 if fresh else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
