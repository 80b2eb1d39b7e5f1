"""What MkDocs adds to docs/: the README as the first page, references of C, Python and the options,
and a page for each file of the repository that a document links to.

    docs/*.md, README.md ──► pages ──links──► files of the repository ──► pages under source/
    lib/include/*.h ───────► reference/c/*.md: each comment with the declarations below it
    refit/__init__.py ─────► reference/python.md: a directive of mkdocstrings for each public name
    configs/refit.yaml ────► reference/options.md

Links between documents are written as GitHub takes them, relative to the file; here they are
rewritten to the page that the file has become. Only `on_files` and `on_page_markdown` know MkDocs:
tests import the rest without it.
"""

import ast
import html
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(\]\()([^)\s#]*)((?:#[^)\s]*)?\))")
LANGUAGES = {".c": "c", ".h": "c", ".cu": "c", ".py": "python", ".sh": "bash", ".yaml": "yaml"}

# ---- Pages for files


def page_of(path: PurePosixPath) -> str:
    """The page that a file of the repository becomes, as MkDocs names its source."""
    if path.parts[0] == "docs" and path.suffix in {".md", ".svg"}:
        return str(path.relative_to("docs"))
    if path.name == "README.md":
        return "index.md" if len(path.parts) == 1 else f"source/{path}"
    if path.is_relative_to("lib/include"):
        return f"reference/c/{path.stem}.md"
    if path.suffix in {".md", ".png"}:
        return f"source/{path}"
    return f"source/{path}.md"


def targets(path: PurePosixPath, text: str) -> Iterator[PurePosixPath]:
    """The files that a document links to."""
    for _, target, _ in LINK.findall(without_code(text)):
        if target and not re.match(r"[a-z]+:", target):
            joined = PurePosixPath(os.path.normpath(path.parent / target))
            if (ROOT / joined).exists():
                yield joined


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)


def linked_files() -> set[PurePosixPath]:
    """All that is reached from README.md and docs/, links of links too."""
    documents = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    waiting = [PurePosixPath(path.relative_to(ROOT)) for path in documents]
    found: set[PurePosixPath] = set()
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            if path.suffix == ".md":
                waiting += targets(path, (ROOT / path).read_text())
            elif (ROOT / path).is_dir():
                waiting += [path / one.name for one in listed(path)]
    return found


def listed(folder: PurePosixPath) -> list[Path]:
    return sorted(one for one in (ROOT / folder).iterdir() if one.is_file())


def relative(target: str, page: str) -> str:
    return os.path.relpath(target, PurePosixPath(page).parent)


def rewritten(text: str, path: PurePosixPath) -> str:
    """The document, with its links to files turned into links to pages."""
    page = page_of(path)

    def link(match: "re.Match[str]") -> str:
        before, target, after = match.groups()
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        joined = PurePosixPath(os.path.normpath(path.parent / target))
        return f"{before}{relative(page_of(joined), page)}{after}"

    parts = re.split(r"(^```.*?^```$)", text, flags=re.M | re.S)
    return "".join(one if one.startswith("```") else LINK.sub(link, one) for one in parts)


def shown(path: PurePosixPath) -> str:
    """A file that is not a document, or the list of a folder's files."""
    if (ROOT / path).is_dir():
        lines = [
            f"- [{one.name}]({relative(page_of(path / one.name), page_of(path))})"
            for one in listed(path)
        ]
        return f"# {path}\n\n" + "\n".join(lines) + "\n"
    language = LANGUAGES.get(path.suffix, "text")
    body = (ROOT / path).read_text()
    return f"# {path}\n\n````{language}\n{body}````\n"


# ---- The reference of C


def declared(code: str) -> list[str]:
    """The names that a declaration introduces, those first that others write."""
    code = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    if match := re.match(r"#define (REFIT_\w+)", code):
        return [match[1]]
    if match := re.match(r"typedef [^{;]*\(\*(\w+)\)", code):
        return [match[1]]
    if code.startswith("typedef"):
        return re.findall(r"(\w+);\s*$", code)
    return re.findall(r"\b(refit_\w+)\(", code)[:1]


def pieces(header: str) -> Iterator[tuple[str, str]]:
    """The header's comments, declarations and what lies between them, each with its kind."""
    lines = iter(header.split("\n"))
    for line in lines:
        piece = [line]
        if line.startswith("/*"):
            while "*/" not in piece[-1]:
                piece.append(next(lines))
            yield "comment", "\n".join(piece)
        elif line.startswith("#"):
            while piece[-1].endswith("\\"):
                piece.append(next(lines))
            yield ("code" if line.startswith("#define") else "gap"), "\n".join(piece)
        elif not line.strip() or line.startswith(('extern "C"', "}")):
            yield "gap", line
        else:
            while not complete("\n".join(piece)):
                piece.append(next(lines))
            yield "code", "\n".join(piece)


def complete(code: str) -> bool:
    plain = re.sub(r"/\*.*?\*/", "", code, flags=re.S)
    plain = re.sub(r"^#.*$", "", plain, flags=re.M)
    return (
        "/*" not in plain
        and plain.count("{") == plain.count("}")
        and plain.rstrip().endswith((";", "*/"))
    )


def comment_lines(comment: str) -> list[str]:
    body = comment.removeprefix("/*").removesuffix("*/")
    return [re.sub(r"^ ?\*( |$)", "", line).rstrip() for line in body.split("\n")]


def prose(comment: str, known: dict[str, str], page: str) -> str:
    """A comment as Markdown: drawings stay as they are, names of the interface become links."""
    found: list[str] = []
    drawing = False
    for line in comment_lines(comment):
        starts = line.startswith("    ") or (drawing and not line)
        if starts and not drawing and line:
            found += ["", "```text"]
        if drawing and not starts:
            found += ["```", ""]
        drawing = starts if line or drawing else False
        found.append(line[4:] if drawing else linked(line.strip(), known, page))
        if line == "Errors:":
            found.append("")  # Markdown wants a blank line before a list
    if drawing:
        found.append("```")
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(found)).strip()
    return re.sub(r"\n+```(\n|$)", r"\n```\1", text)


def linked(line: str, known: dict[str, str], page: str) -> str:
    parts = re.split(r"(`[^`]*`)", line)
    for i, part in enumerate(parts):
        if part.startswith("`"):
            continue
        part = html.escape(part, quote=False).replace("*", r"\*").replace("_", r"\_")
        part = part.replace("[", r"\[")
        parts[i] = re.sub(
            r"\brefit(?:\\_\w+)+", lambda m: reference(m[0].replace("\\", ""), known, page), part
        )
        parts[i] = re.sub(
            r"\bREFIT(?:\\_[A-Z0-9]+)+", lambda m: f"`{m[0]}`".replace("\\", ""), parts[i]
        )
    text = "".join(parts)
    return re.sub(r"^- ", "\n- ", text) if text.startswith("- ") else text


def reference(name: str, known: dict[str, str], page: str) -> str:
    if name not in known:
        return f"`{name}`"
    return f"[`{name}`]({relative(known[name], page)}#{name})"


def headers() -> list[PurePosixPath]:
    include = ROOT / "lib" / "include"
    return [
        PurePosixPath(path.relative_to(ROOT))
        for path in [include / "refit.h", *sorted((include / "refit").rglob("*.h"))]
    ]


def entries(header: str) -> tuple[str, list[tuple[str, list[str]]]]:
    """The opening comment; then each comment (or "") with the declarations right below it. Comments
    of sections have none."""
    opening, found = "", []
    comment, code = "", []

    def end() -> None:
        nonlocal comment, code
        if code or comment.startswith("/* ----"):
            found.append((comment, code))
        comment, code = "", []

    for kind, text in pieces(header):
        if kind == "code" and declared(text) and not declared(text)[0].endswith("_H"):
            code.append(text)
            continue
        if kind != "code":
            end()
        if kind == "comment":
            opening, comment = (opening, text) if opening else (text, "")
    end()
    return opening, found


def known_names() -> dict[str, str]:
    """Each name of the public headers, and the page that has it."""
    return {
        name: page_of(path)
        for path in headers()
        for _, codes in entries((ROOT / path).read_text())[1]
        for code in codes
        for name in declared(code)
    }


def c_page(path: PurePosixPath, known: dict[str, str]) -> str:
    page = page_of(path)
    opening, found = entries((ROOT / path).read_text())
    out = [f"# {path.relative_to('lib/include')}", prose(opening, known, page)]
    seen: set[str] = set()
    for comment, codes in found:
        if comment.startswith("/* ----"):
            out.append("## " + re.sub(r"^[-\s]+|[-\s]+$", "", " ".join(comment_lines(comment))))
            continue
        names = [one for code in codes for one in declared(code) if one not in seen]
        seen.update(names)
        if names:
            out.append(f"### {', '.join(f'`{one}`' for one in names)} {{ #{names[0]} }}")
            out += [f"[](){{ #{one} }}" for one in names[1:]]
        out.append(prose(comment, known, page) if comment else "")
        out.append("```c\n" + "\n".join(codes) + "\n```")
    return "\n\n".join(one for one in out if one) + "\n"


# ---- The references of Python and of the options


def public_names() -> dict[str, str]:
    """Each name of `refit.__all__` that has a module of its own, and that module."""
    tree = ast.parse((ROOT / "bindings/python/src/refit/__init__.py").read_text())
    found = {
        one.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("refit.")
        for one in node.names
        if not one.name.startswith("_")
    }
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
    ]
    return {name: found[name] for name in names if name in found}


def python_page() -> str:
    names = public_names()
    errors = [name for name, module in names.items() if module == "refit.errors"]
    others = [name for name in names if name not in errors]
    out = ["# Python reference", "Everything here is imported from `refit` itself."]
    out += [f"::: {names[name]}.{name}" for name in others]
    out += ["## Errors", "All of them are of the class `RefitError`."]
    out += [f"::: {names[name]}.{name}\n    options:\n      heading_level: 3" for name in errors]
    folder = ROOT / "bindings/python/src/refit/integrations"
    modules = sorted(one.stem for one in folder.glob("*.py") if not one.stem.startswith("_"))
    out.append("## refit.integrations")
    out += [
        f"::: refit.integrations.{one}\n    options:\n      heading_level: 3" for one in modules
    ]
    return "\n\n".join(out) + "\n"


def options_page() -> str:
    body = (ROOT / "configs/refit.yaml").read_text()
    return (
        "# All options\n\n`configs/refit.yaml` has every option with its default. "
        "[Configuration](../configuration.md) says how options are set.\n\n"
        f"```yaml\n{body}```\n"
    )


# ---- MkDocs


def generated() -> dict[str, str | Path]:
    """The pages that are not in docs/, by name: their text, or the file to copy."""
    known = known_names()
    pages: dict[str, str | Path] = {page_of(path): c_page(path, known) for path in headers()}
    pages["reference/python.md"] = python_page()
    pages["reference/options.md"] = options_page()
    for path in linked_files():
        page = page_of(path)
        if page in pages or path.parts[0] == "docs":
            continue
        if path.suffix == ".png":
            pages[page] = ROOT / path
        elif path.suffix == ".md":
            pages[page] = rewritten((ROOT / path).read_text(), path)
        else:
            pages[page] = shown(path)
    return pages


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, content in sorted(generated().items()):
        if isinstance(content, Path):
            files.append(File.generated(config, page, abs_src_path=str(content)))
        else:
            files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.generated_by:
        return markdown
    return rewritten(markdown, PurePosixPath("docs") / page.file.src_uri)
