"""Imports between folders point one way, and the map names every file.

The files of the command line come after all folders.
"""

import ast
import pathlib
import re

import pytest

import poet_jax

PACKAGE = pathlib.Path(poet_jax.__file__).parent
FOLDERS = """
    core
    stores
    passes
    devices
    planners
    emit
    viz
    api
    update
    flax
""".split()
PROGRAM = ["__main__.py", "cli.py", "target.py"]


def imports(path):
    """Dotted names that `path` imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_from_those_before_it(folder):
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    for path in (PACKAGE / folder).rglob("*.py"):
        for name in imports(path):
            if name.startswith("poet_jax."):
                assert name.split(".")[1] in allowed, f"{path} imports {name}"


def test_every_file_is_in_a_folder():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(FOLDERS)
    files = sorted(path.name for path in PACKAGE.glob("*.py"))
    assert files == ["__init__.py", *PROGRAM]


@pytest.mark.parametrize("file", ["__init__.py", *PROGRAM])
def test_no_file_imports_the_program(file):
    """But for the program itself: `__main__` imports `cli`, which imports `target`."""
    names = set(imports(PACKAGE / file))
    assert not names & {"poet_jax.__main__"}
    assert "poet_jax.cli" not in names or file == "__main__.py"
    assert "poet_jax.target" not in names or file == "cli.py"


def test_no_function_has_the_name_of_a_module_beside_it():
    for path in PACKAGE.rglob("__init__.py"):
        modules = {x.stem for x in path.parent.glob("*.py")} - {"__init__"}
        modules |= {x.parent.name for x in path.parent.glob("*/__init__.py")}
        names = {
            alias.asname or alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
            # Of a module itself there is no other.
            if not (PACKAGE / node.module.partition(".")[2].replace(".", "/")).is_dir()
        }
        assert modules.isdisjoint(names), path


def test_the_map_names_every_file_once():
    text = (PACKAGE.parent / "docs" / "reference" / "map.md").read_text()
    named = re.findall(r"`([a-z0-9_/]+\.py)`", text)
    files = [x for x in PACKAGE.rglob("*.py") if x.name != "__init__.py"]
    assert sorted(named) == sorted(str(x.relative_to(PACKAGE)) for x in files)


def test_only_public_modules_of_jax_are_imported():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path
        assert not any("._" in x for x in imports(path) if "poet_jax" not in x), path


def test_the_public_names_are_listed_and_exist():
    assert len(set(poet_jax.__all__)) == len(poet_jax.__all__)
    assert all(hasattr(poet_jax, name) for name in poet_jax.__all__)
