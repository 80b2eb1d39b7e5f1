"""The structs, numbers and functions that ctypes knows are those of the C headers."""

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refit._c import abi

COMPILER = shlex.split(os.environ.get("CC", "cc"))

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"there is no C compiler ({COMPILER[0]}) here"
)


def structures() -> list[type[ctypes.Structure]]:
    return [
        one
        for one in vars(abi).values()
        if isinstance(one, type)
        and issubclass(one, ctypes.Structure)
        and one is not ctypes.Structure
    ]


def constants() -> dict[str, int]:
    return {name: value for name, value in vars(abi).items() if isinstance(value, int)}


def facts_of_ctypes() -> dict[str, int]:
    facts = constants()
    for struct in structures():
        name = struct.__name__
        facts[f"sizeof {name}"] = ctypes.sizeof(struct)
        for row in struct._fields_:
            field = getattr(struct, row[0])
            facts[f"{name}.{row[0]} at"] = field.offset
            facts[f"{name}.{row[0]} bytes"] = field.size
    return facts


def probe_text(include: Path) -> str:
    """A C program that prints the same facts, each from the header."""
    rows = [f'    fact("{name}", {name});' for name in constants()]
    for struct in structures():
        name = struct.__name__
        rows.append(f'    fact("sizeof {name}", sizeof({name}));')
        for row in struct._fields_:
            rows.append(
                f'    fact("{name}.{row[0]} at", offsetof({name}, {row[0]}));\n'
                f'    fact("{name}.{row[0]} bytes", sizeof((({name} *)0)->{row[0]}));'
            )
    headers = sorted(path.name for path in (include / "refit" / "advanced").glob("*.h"))
    advanced = "".join(f"#include <refit/advanced/{name}>\n" for name in headers)
    return (
        f"#include <refit.h>\n{advanced}#include <stddef.h>\n#include <stdio.h>\n"
        "static void fact(const char *what, unsigned long long value)\n"
        '{\n    printf("%s\\t%llu\\n", what, value);\n}\n'
        "int main(void)\n{\n" + "\n".join(rows) + "\n    return 0;\n}\n"
    )


def facts_of_compiler(root: Path, folder: Path) -> dict[str, int]:
    source, program = folder / "probe.c", folder / "probe"
    include = root / "lib" / "include"
    source.write_text(probe_text(include))
    subprocess.run(
        [*COMPILER, "-std=c11", f"-I{include}", str(source), "-o", str(program)], check=True
    )
    output = subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout
    pairs = (line.split("\t") for line in output.splitlines())
    return {what: int(value) for what, value in pairs}


@needs_compiler
def test_declarations_are_those_of_the_headers(root: Path) -> None:
    check = subprocess.run(
        [sys.executable, str(root / "bindings" / "python" / "make_abi.py"), "--check"],
        capture_output=True,
        text=True,
    )
    assert check.returncode == 0, check.stdout + check.stderr


@needs_compiler
def test_sizes_offsets_and_numbers_are_the_compilers(root: Path, tmp_path: Path) -> None:
    ours = facts_of_ctypes()
    assert len(structures()) >= 10
    assert len(ours) > 200
    assert ours == facts_of_compiler(root, tmp_path)


def test_every_exported_function_has_a_prototype(root: Path) -> None:
    listed = (root / "tests" / "abi" / "symbols.txt").read_text().split()
    functions = {name for name in listed if name.startswith("refit_")}
    assert len(functions) > 50
    assert functions == set(abi.PROTOTYPES)


def test_structs_say_their_size_first_or_never() -> None:
    """Those that grow begin with their size; refit_error and handles of fixed size do not."""
    for struct in structures():
        names = [row[0] for row in struct._fields_]
        assert "size" not in names[1:], struct.__name__


@pytest.mark.parametrize("struct", structures(), ids=lambda one: one.__name__)
def test_a_struct_refuses_a_field_that_the_header_lacks(struct: type[ctypes.Structure]) -> None:
    """Also as an element of an array, and as a keyword."""
    for one in (struct(), (struct * 1)()[0]):
        with pytest.raises(AttributeError, match="no_such_field"):
            one.no_such_field = 1  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no_such_field"):
        struct(no_such_field=1)
