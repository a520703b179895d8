"""The library of pages is built when it is needed, or a sentence says why it is not."""

from processes import python

ONE_PROCESS = True


def test_importing_it_builds_and_starts_nothing(tmp_path):
    python(
        f"""
        import os, threading
        from poet_jax.stores import library
        assert not os.listdir({str(tmp_path)!r})
        with open("/proc/self/maps") as file:
            assert "pages-" not in file.read()
        """,
        XDG_CACHE_HOME=str(tmp_path),
    )


ASK = """
    import poet_jax
    from poet_jax.stores import library
    assert library.problem()
    for _ in range(2):
        try:
            library.load()
        except poet_jax.PageStoreError as error:
            print(error)
"""


def test_a_compiler_that_is_missing_is_one_sentence(tmp_path):
    environment = {"XDG_CACHE_HOME": tmp_path, "PATH": tmp_path, "CXX": "/no/such/c++"}
    said = python(ASK, **{name: str(x) for name, x in environment.items()})
    assert said == 2 * (
        "Paging to files needs a C++ compiler, and none of $CXX, c++, g++, clang++ was "
        "found; install one (Debian: apt-get install g++), or plan without paging with "
        "MilpPlanner(paging=False).\n"
    )


def test_a_budget_too_small_says_that_nothing_could_be_paged(tmp_path):
    said = python(
        """
        import jax.numpy as jnp, poet_jax
        try:
            device = poet_jax.devices.RASPBERRY_PI_4
            poet_jax.schedule(jnp.sin, 1, device=device).plan(jnp.ones(8))
        except poet_jax.BudgetTooSmall as error:
            print(error.__notes__)
        """,
        **{"XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path), "CXX": "no-such"},
    )
    assert "No value was paged" in said and "install one" in said


def test_a_compiler_that_fails_is_quoted_and_not_asked_again(tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\necho called >> "$0.log"\n'
        'test "$1" = --version && exit 0\n'
        "echo in pages.cc: >&2; echo pages.cc:1: error: no such luck >&2; exit 1\n"
    )
    compiler.chmod(0o755)
    said = python(ASK, XDG_CACHE_HOME=str(tmp_path), CXX=str(compiler)).splitlines()
    assert said[0] == said[1] and "no such luck" in said[0] and "g++" in said[0]
    assert (tmp_path / "compiler.log").read_text() == "called\n" * 2
    assert not list((tmp_path / "poet_jax").iterdir())


def test_a_home_that_cannot_be_written_to_is_done_without():
    said = python(
        "from poet_jax.stores import library; print(repr(library.problem()))",
        XDG_CACHE_HOME="/proc",
    )
    assert said == "''\n"
