"""The documents: their links lead somewhere, their Python compiles, and the quick start and what
they show of a bound engine run."""

import importlib.util
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any

import pytest

LINK = re.compile(r"(?<!`)\[(?:[^\]`]|`[^`]*`)+\]\(([^)\s]+)\)")

NAMED = re.compile(r"(?<![\w./])(?:tests|examples|configs|lib|kernels|\.ci)/[\w./*-]*\w")


def documents(root: Path) -> list[Path]:
    """The Markdown files of the repository, those of tests and examples too."""
    folders = [root / name for name in ("docs", "lib", "bindings", "examples", "tests", ".github")]
    found = [*root.glob("*.md"), *(path for one in folders for path in one.rglob("*.md"))]
    return sorted(path for path in found if "site" not in path.relative_to(root).parts)


def prose(path: Path) -> str:
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """Those of its headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in plain}


def links(root: Path) -> Iterator[tuple[Path, str]]:
    for path in documents(root):
        for target in LINK.findall(prose(path)):
            if not re.match(r"[a-z]+:", target):
                yield path, target


def test_every_link_leads_to_a_file_and_a_heading(root: Path) -> None:
    dead = []
    seen = 0
    for path, target in links(root):
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        seen += 1
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(f"{path.relative_to(root)}: {target}")
    assert not dead
    assert seen > 80


def test_every_document_is_reached_from_the_readme(root: Path) -> None:
    reached, waiting = set(), [root / "README.md"]
    while waiting:
        path = waiting.pop()
        if path in reached or path.suffix != ".md":
            continue
        reached.add(path)
        targets = [target.partition("#")[0] for target in LINK.findall(prose(path))]
        waiting += [
            (path.parent / one).resolve() for one in targets if one and not re.match("[a-z]+:", one)
        ]
    assert {path for path in documents(root) if path.parent == root / "docs"} <= reached


def test_the_readme_is_short(root: Path) -> None:
    assert len((root / "README.md").read_text().splitlines()) <= 150


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)


def test_every_python_block_compiles(root: Path) -> None:
    blocks = [
        (path, block)
        for path in [root / "README.md", *(root / "docs").glob("*.md")]
        for block in python_blocks(path)
    ]
    for path, block in blocks:
        compile(block, str(path), "exec")
    assert len(blocks) > 15


def test_no_document_names_a_path_that_is_gone(root: Path) -> None:
    """Scripts and folders of the sources that commands and sentences name."""
    gone = []
    for path in [root / "README.md", *(root / "docs").glob("*.md")]:
        text = path.read_text()
        for name in NAMED.findall(text):
            if not list(root.glob(name)) and not list(root.glob(f"{name}*")):
                gone.append(f"{path.name}: {name}")
    assert not gone


NAMED = re.compile(r"`([\w./]+\.(?:c|py|h))`(?:\]\([^)]*\))? \(((?:`[\w.]+`(?:, )?)+)\)")
"""A file, and in brackets functions of it."""


@pytest.mark.parametrize("page", ["UPDATE", "STEP", "REGION", "ACTIVATION"])
def test_the_functions_that_a_tour_names_are_in_their_files(root: Path, page: str) -> None:
    named = NAMED.findall((root / "lib" / f"{page}.md").read_text())
    assert named
    places = [root / "lib", root / "kernels", root / "bindings" / "python" / "src"]
    for path, functions in named:
        files = [file for place in places for file in place.rglob(PurePosixPath(path).name)]
        texts = [file.read_text() for file in files]
        for function in re.findall(r"`(?:\w+\.)*(\w+)`", functions):
            found = any(re.search(rf"\b{function}\b", text) for text in texts)
            assert found, f"{page}.md: {function} is not in {path}"


def block_with(root: Path, name: str, words: str) -> str:
    (found,) = [one for one in python_blocks(root / "docs" / name) if words in one]
    return found


def test_an_engine_is_bound_as_the_guide_shows(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import threading

    import refit
    from broadcasting import TIMEOUT, both

    with both() as (publisher, subscriber):
        model = torch.nn.Linear(4, 4)
        weights = {name: one + 1 for name, one in model.state_dict().items()}
        checked: list[Any] = []

        def generate(version: int) -> None:
            checked.append(version)
            raise StopIteration

        monkeypatch.setattr(refit, "Subscriber", lambda **_: subscriber)
        names = {
            "refit": refit,
            "name": "w0",
            "model": model,
            "check": checked.append,
            "generate": generate,
        }
        sender = threading.Thread(target=publisher.publish, args=(weights,))
        sender.start()
        with pytest.raises(StopIteration):
            exec(block_with(root, "python.md", "subscriber.bind(model)"), names)
        sender.join(TIMEOUT)
        assert checked == [model, 1]
        assert all(torch.equal(one, weights[name]) for name, one in model.state_dict().items())


def test_the_quick_start_runs_as_it_stands(root: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    (program,) = python_blocks(root / "docs" / "quickstart.md")
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    # Two threads print: a line of one may end in a line of the other.
    left = re.findall(r"trainer: loss \d\.\d{3}, (\d+) bytes left", ran.stdout)
    assert re.findall(r"worker: version (\d)", ran.stdout) == ["1", "2", "3"]
    assert left[0] == "0"
    assert 0 < int(left[1]) == int(left[2])


def a_policy() -> Any:
    """A model with layers, whose output has the loss, as in the guides."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(4))

        def forward(self, batch: Any) -> Any:
            for layer in self.layers:
                batch = layer(batch).tanh()
            return SimpleNamespace(loss=batch.square().mean())

    torch.manual_seed(7)
    return Model()


@pytest.mark.parametrize("page", ["activations.md", "python.md"])
def test_activations_leave_as_the_guides_show(root: Path, page: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    import refit

    block = block_with(root, page, "with activations:")
    assert '"8GiB"' in block
    left: list[float] = []

    class Offload(refit.ActivationOffload):
        def __exit__(self, *of_the_block: Any) -> None:
            super().__exit__(*of_the_block)
            left.append(self.stats()["refit/activation_left_bytes_last"])

    batches = torch.randn(3, 512, 256)
    shown, plain = a_policy(), a_policy()
    names = {
        "refit": SimpleNamespace(ActivationOffload=Offload),
        "model": shown,
        "optimizer": torch.optim.SGD(shown.parameters(), lr=0.1),
        "loader": batches,
        "batch": batches[0],
    }
    exec(block.replace("8GiB", "8MiB"), names)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    steps = len(batches) if page == "activations.md" else 1
    for batch in batches[:steps]:
        plain(batch).loss.backward()
        if page == "activations.md":
            optimizer.step()
            optimizer.zero_grad()
    for mine, other in zip(shown.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, other)
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)
    assert len(left) == steps
    assert max(left) > 0


def test_the_guide_has_every_keyword_of_an_activation_offload(root: Path) -> None:
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import refit

    text = (root / "docs" / "activations.md").read_text()
    table = text[text.index("## Options") : text.index("## The arena")]
    shown = re.findall(r"^\| `(\w+)` \|", table, re.M)
    takes = inspect.signature(refit.ActivationOffload.__init__).parameters
    assert [*shown, "config", "overrides"] == list(takes)[2:]  # self and the model


def test_options_are_taken_over_as_the_guide_shows(root: Path) -> None:
    import refit
    import refit.integrations.activations

    block = block_with(root, "activations.md", "activations.take(args)").replace("8GiB", "8MiB")
    args = SimpleNamespace(cpu_offloading_num_layers=2, num_layers=4)
    names: dict[str, Any] = {"refit": refit, "model": a_policy(), "args": args}
    exec(block, names)
    assert args.cpu_offloading_num_layers == 0
    assert names["chosen"] == {"keep_last": 2}
    names["activations"].close()


def test_the_install_commands_name_the_extras_that_exist(root: Path) -> None:
    import tomllib

    project = tomllib.loads((root / "bindings" / "python" / "pyproject.toml").read_text())
    extras = set(project["project"]["optional-dependencies"])
    for path in [root / "README.md", *(root / "docs").glob("*.md")]:
        for named in re.findall(r"bindings/python\[([\w,]+)\]", path.read_text()):
            assert set(named.split(",")) <= extras, path


def test_every_script_that_a_document_runs_can_be_run(root: Path) -> None:
    names = set()
    for path in [root / "README.md", *(root / "docs").glob("*.md")]:
        names |= set(re.findall(r"(?:^|`)((?:examples|tests)/[\w/]+\.sh)", path.read_text(), re.M))
    assert {"examples/demo.sh", "tests/run.sh"} <= names
    for name in names:
        subprocess.run(["bash", "-n", root / name], check=True)
        assert (root / name).stat().st_mode & 0o111, name


@pytest.fixture
def hooks(root: Path) -> Any:
    """What the site adds to docs/, without MkDocs."""
    spec = importlib.util.spec_from_file_location("hooks", root / "docs" / "site" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_c_has_every_exported_function(root: Path, hooks: Any) -> None:
    pages = hooks.generated()
    exported = set((root / "tests" / "abi" / "symbols.txt").read_text().split())
    known = hooks.known_names()
    assert exported <= known.keys(), exported - known.keys()
    for name in exported:
        assert f"#{name} }}" in pages[known[name]], name


def test_the_reference_of_python_has_every_public_name(hooks: Any) -> None:
    import refit

    text = hooks.python_page()
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.M))
    assert set(refit.__all__) - {"__version__"} <= shown, set(refit.__all__) - shown


def test_links_of_documents_become_links_of_pages(hooks: Any) -> None:
    path = PurePosixPath("docs/python.md")
    assert hooks.rewritten("[a](../README.md#b)", path) == "[a](index.md#b)"
    assert hooks.rewritten("[a](c.md)", path) == "[a](c.md)"
    header = hooks.rewritten("[a](../lib/include/refit/stats.h)", path)
    assert header == "[a](reference/c/stats.md)"
    assert hooks.rewritten("[a](../tests/README.md)", path) == "[a](source/tests/README.md)"
    code = "```sh\n[a](c.h)\n```"
    assert hooks.rewritten(code, path) == code


def test_every_document_is_in_the_navigation_of_the_site(root: Path) -> None:
    text = (root / "mkdocs.yml").read_text()
    for path in (root / "docs").glob("*.md"):
        assert re.search(rf": {path.name}$", text, re.M), path.name
    for path in (root / "lib" / "include" / "refit").rglob("*.h"):
        assert f": reference/c/{path.stem}.md" in text, path.name
