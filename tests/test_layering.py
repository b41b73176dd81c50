"""The shape of the house: which folder may import which, and how large a module may grow."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

BELOW = {
    "data_prep": set(),
    "pretraining": {"data_prep"},
    "fine_tuning": {"data_prep", "pretraining"},
}
HEAVY = {"torch", "deepspeed"}
LAZY = {"webdataset"}  # it imports torch, so only the function that writes a tar may ask for it
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60


def modules(root: Path) -> list[Path]:
    """All modules of the three packages, wherever below them they lie."""
    return sorted(path for package in BELOW for path in (root / package).rglob("*.py"))


def _nodes(tree: ast.AST, at_import: bool) -> Iterator[ast.AST]:
    """All nodes below `tree`, or only those that run when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield node
        yield from _nodes(node, at_import)


def imported(path: Path, at_import: bool = False) -> set[str]:
    """Dotted names that a module imports: anywhere, or only when it is itself imported.

    `from a import b` gives both `a` and `a.b`, as b may be a module. Relative imports are made absolute.
    """
    names = set()
    for node in _nodes(ast.parse(path.read_text(encoding="utf-8")), at_import):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            here = [path.parent.name] if node.level else []
            module = ".".join(here + ([node.module] if node.module else []))
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def upward_imports(root: Path) -> list[str]:
    """Imports of a package from one that it must not know."""
    found = []
    for path in modules(root):
        package = path.relative_to(root).parts[0]
        tops = {name.split(".")[0] for name in imported(path)}
        found += [
            f"{path.relative_to(root)} imports {top}"
            for top in tops & (set(BELOW) - BELOW[package] - {package})
        ]
    return sorted(found)


def heavy_imports(root: Path) -> list[str]:
    """What data_prep imports of torch and deepspeed anywhere, and of webdataset outside functions."""
    found = []
    for path in modules(root):
        if path.relative_to(root).parts[0] != "data_prep":
            continue
        anywhere = {name.split(".")[0] for name in imported(path)}
        eagerly = {name.split(".")[0] for name in imported(path, at_import=True)}
        found += [f"{path.relative_to(root)} imports {top}" for top in anywhere & HEAVY | eagerly & LAZY]
    return sorted(found)


def import_cycle(root: Path) -> list[str]:
    """Modules that import each other in a ring while they are being imported, or nothing."""
    names = {".".join(path.relative_to(root).with_suffix("").parts): path for path in modules(root)}
    graph = {name: imported(path, at_import=True) & set(names) for name, path in names.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def misplaced(root: Path) -> list[str]:
    """Modules below a sub-package and modules named for nothing."""
    paths = [path.relative_to(root) for path in modules(root)]
    return [
        str(path)
        for path in paths
        if len(path.parts) != 2 or path.stem in ("utils", "util", "helpers", "common")
    ]


def too_long(root: Path) -> list[str]:
    """Modules and functions beyond the size at which they ask for a reason."""
    found = []
    for path in modules(root):
        text = path.read_text(encoding="utf-8")
        lines = len(text.splitlines())
        if lines > MAX_MODULE_LINES:
            found.append(f"{path.relative_to(root)} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = node.end_lineno - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(root)}: {node.name} has {lines} lines")
    return found


def test_imports_run_down_only(repository):
    """data_prep knows nobody, pretraining knows data_prep, fine_tuning knows both; never the other way."""
    assert upward_imports(repository) == []


def test_data_prep_never_imports_torch_or_deepspeed(repository):
    """No line of data_prep imports torch or deepspeed, and webdataset is imported only inside functions."""
    assert heavy_imports(repository) == []


def test_no_import_cycles(repository):
    """No ring of modules imports each other at import time."""
    assert import_cycle(repository) == []


def test_packages_are_flat_and_modules_have_names(repository):
    """There are no sub-packages and no `utils.py`."""
    assert misplaced(repository) == []


def test_modules_and_functions_stay_small(repository):
    """Outside tests no module has over 400 lines and no function over 60."""
    assert too_long(repository) == []


def test_importing_data_prep_leaves_torch_alone(repository):
    """Importing any module of data_prep in a fresh process leaves torch and deepspeed unloaded."""
    names = sorted(path.stem for path in (repository / "data_prep").glob("*.py") if path.stem != "__init__")
    assert names
    program = (
        "import importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module('data_prep.' + name)\n"
        "    loaded = {'torch', 'deepspeed'} & set(sys.modules)\n"
        "    assert not loaded, f'data_prep.{name} brings {loaded}'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


OFFENCES = {
    "an upward import": ("data_prep/a.py", "def f():\n    import pretraining.model\n", upward_imports),
    "a from-import upward": ("pretraining/a.py", "from fine_tuning import heads\n", upward_imports),
    "torch in a function": ("data_prep/a.py", "def f():\n    from torch import nn\n", heavy_imports),
    "webdataset at the top": ("data_prep/a.py", "if True:\n    import webdataset as wds\n", heavy_imports),
    "a ring of imports": ("data_prep/a.py", "from . import a\n", import_cycle),
    "a sub-package": ("fine_tuning/glue/a.py", "", misplaced),
    "a utils.py": ("pretraining/utils.py", "", misplaced),
    "a long module": ("pretraining/a.py", "x = 1\n" * (MAX_MODULE_LINES + 1), too_long),
    "a long method": (
        "pretraining/a.py",
        "class C:\n    def f(self):\n" + "        x = 1\n" * MAX_FUNCTION_LINES,
        too_long,
    ),
}


@pytest.mark.parametrize(("path", "text", "check"), OFFENCES.values(), ids=OFFENCES)
def test_each_offence_is_seen(tmp_path, path, text, check):
    """The checks above are not blind: a module with one offence is reported by the check for it."""
    offender = tmp_path / path
    offender.parent.mkdir(parents=True)
    offender.write_text(text)
    assert check(tmp_path)


def test_innocent_modules_pass(tmp_path):
    """The checks above accuse no innocent: downward imports, a lazy webdataset, a full-size function."""
    for package in BELOW:
        (tmp_path / package).mkdir()
    (tmp_path / "data_prep/a.py").write_text("def f():\n    import webdataset\n")
    (tmp_path / "pretraining/b.py").write_text("import torch\nfrom data_prep import a\nfrom . import c\n")
    (tmp_path / "pretraining/c.py").write_text("def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1))
    for check in (upward_imports, heavy_imports, import_cycle, misplaced, too_long):
        assert not check(tmp_path)
