"""Imports point one way: a file imports only files above it in the design's list."""

import ast
import pathlib
import re

import poet_jax

PACKAGE = pathlib.Path(poet_jax.__file__).parent
LAYERS = """
    units progress errors graph trace coarsen scratch recompute convolution depthwise
    pooling cpu_kernels stores.store stores.library stores.paged stores kernels timing
    in_place order device devices.paper devices node_costs price calibrate machine plan
    program simulate postpone planners planners.judge planners.keep_all
    planners.sqrt planners.greedy planners.repair planners.worker planners.solver
    planners.objective planners.choice planners.cuts planners.lift planners.rounds
    planners.bounds planners.neighbourhoods planners.exact planners.milp
    planners.paper emit.accelerator emit.cpu emit.stages emit.program emit.within emit
    executor explain effects reasons timeline matrices figures dot perfetto report
    stream rewrite narrow associate fold state pareto cache schedule arguments
    transform training part blocks update.scheme update.items update.search update
    nnx linen flax_step __init__
""".split()


def modules():
    """{dotted name below the package: path}"""
    result = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        result[".".join(parts)] = path
    return result


def imports(path):
    """Dotted names that `path` imports, wherever in the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_file_has_a_layer():
    assert sorted(modules()) == sorted(LAYERS)


def test_the_map_names_every_file_once():
    text = (PACKAGE.parent / "docs" / "map.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py)`", text)
    files = [path for path in PACKAGE.rglob("*.py") if path.read_text()]
    files.remove(PACKAGE / "__init__.py")
    assert sorted(named) == sorted(str(x.relative_to(PACKAGE)) for x in files)


def test_a_file_imports_only_files_above_it():
    found = modules()
    wrong = [
        (name, imported)
        for name, path in found.items()
        for imported in (
            x.removeprefix("poet_jax.") for x in imports(path) if "poet_jax" in x
        )
        if imported in found
        # A package is named where it, or one of its parts, names a part.
        and not f"{name}.".startswith(f"{imported}.")
        and LAYERS.index(imported) >= LAYERS.index(name)
    ]
    assert not wrong


def test_only_public_modules_of_jax_are_imported():
    for path in PACKAGE.rglob("*.py"):
        assert "jax._src" not in path.read_text(), path
        assert not any("._" in x for x in imports(path) if "poet_jax" not in x), path


def test_the_public_names_are_listed_and_exist():
    assert len(set(poet_jax.__all__)) == len(poet_jax.__all__)
    assert all(hasattr(poet_jax, name) for name in poet_jax.__all__)
