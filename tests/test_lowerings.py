"""Other ways to compute a convolution or a product: the same numbers, and the choice is
made once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import DEVICE
from test_convolution import convolutions, convolve

import poet_jax
from poet_jax import lowerings


@pytest.fixture(autouse=True)
def everything_is_worth_it(monkeypatch):
    """Lowerings are tried on small arrays, too."""
    monkeypatch.setattr(lowerings, "LEAST_FLOPS", 0)


def equations(fun, *args):
    graph = poet_jax.trace(fun, *args)
    return [e for node in graph.nodes for e in node.equations]


def check_all(fun, *args):
    """Every lowering of what `fun` does gives the same; their names."""
    names = set()
    (equation,) = [
        e for e in equations(fun, *args) if e.primitive.name == "conv_general_dilated"
    ]
    # Layouts and strides are the equation's own, so its operands are random anew.
    rng = np.random.default_rng(0)
    operands = [
        jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in equation.operand_shapes
    ]
    (expected,) = jax.jit(lambda *x: equation.bind(x))(*operands)
    for lowering in lowerings.others(equation, True):
        names.add(lowering.__name__)
        result = jax.jit(functools.partial(lowering, equation.params))(*operands)
        assert result.shape == expected.shape and result.dtype == expected.dtype
        scale = float(jnp.abs(expected).max()) + 1e-6
        difference = float(jnp.abs(result - expected).max()) if result.size else 0.0
        assert difference <= 2e-5 * scale, lowering.__name__
    return names


@settings(max_examples=6)
@given(case=convolutions(), cached=st.sampled_from([1, 2**10, 2**20]))
def test_convolutions_and_their_gradients_are_the_same_in_every_way(case, cached):
    """Also of images so large that their rows come in parts."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(lowerings, "CACHED_BYTES", cached)
        check_gradients(*case)


def check_gradients(convolution, image, kernel):
    tried = check_all(convolution, image, kernel)
    assert {"im2col", "channels_first"} <= tried
    result = jax.eval_shape(convolution, image, kernel)

    def input_gradient(slope, kernel):
        _, back = jax.vjp(lambda image: convolution(image, kernel), image)
        return back(slope)

    def filter_gradient(slope, image):
        _, back = jax.vjp(lambda kernel: convolution(image, kernel), kernel)
        return back(slope)

    check_all(input_gradient, jnp.ones(result.shape), kernel)
    check_all(filter_gradient, jnp.ones(result.shape), image)


@pytest.mark.parametrize(
    ("size", "padding", "layout"),
    [((6, 7), "SAME", "NHWC"), ((3, 8), "VALID", "NCHW")],
)
def test_winograd_is_tried_and_right(size, padding, layout):
    shape = (2, *size, 3) if layout == "NHWC" else (2, 3, *size)

    def fun(image, kernel):
        return convolve(image, kernel, (layout, "HWIO", layout), padding=padding)

    assert "winograd" in check_all(fun, jnp.ones(shape), jnp.ones((3, 3, 3, 5)))


def net(params, images):
    for kernel in params[:-1]:
        images = jax.nn.relu(convolve(images, kernel))
    return jnp.mean((images.mean((1, 2)) @ params[-1]) ** 2)


PARAMS = [jnp.ones((3, 3, 2, 4)) / 9, jnp.ones((4, 3))]
IMAGES = jnp.linspace(-1, 1, 2 * 8 * 8 * 2).reshape(2, 8, 8, 2)


@pytest.mark.parametrize("approximate", [False, True])
def test_the_choice_is_made_once_and_changes_no_result(
    approximate, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways = ["im2col", "channels_first", "winograd", "bfloat16_product"]
    asked = []

    def measure(node, approximate):
        """Each in another way: what a machine would say differs."""
        (equation,) = node.equations
        names = ["xla", *(x.__name__ for x in lowerings.others(equation, approximate))]
        chosen = next((x for x in ways if x in names), "xla")
        ways.append(ways.pop(0))
        asked.append(chosen)
        return {n: lowerings.Measured(2.0 - (n == chosen), 0) for n in names}

    monkeypatch.setattr(lowerings, "measure", measure)

    def fastest(graph):
        return lowerings.fastest(graph, approximate)

    expected = jax.jit(jax.grad(net))(PARAMS, IMAGES)
    for _ in range(2):
        passes = (poet_jax.coarsen, poet_jax.order, fastest)
        scheduled = poet_jax.schedule(
            jax.grad(net), "1MiB", device=DEVICE, passes=passes
        )
        result = scheduled(PARAMS, IMAGES)
        tolerance = 2e-2 if approximate else 1e-5
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
        used = {
            e.lowering.__name__
            for node in scheduled.plan(PARAMS, IMAGES).graph.nodes
            for e in node.equations
            if e.lowering is not None
        }
        assert used == set(asked) - {"xla"} and used
        assert "bfloat16_product" not in used or approximate
        monkeypatch.setattr(lowerings, "measure", None)  # the file knows by now


def test_every_way_is_measured():
    (node,) = poet_jax.trace(convolve, IMAGES, PARAMS[0]).nodes
    measured = lowerings.measure(node)
    assert list(measured) == ["xla", "im2col", "channels_first"]
    assert all(0 < x.seconds < 10 and x.workspace_bytes >= 0 for x in measured.values())


def test_an_image_at_a_time_is_a_way():
    """So `fastest` does not undo what `large_convolutions` did."""
    image, kernel = jnp.ones((16, 64, 64, 96)), jnp.ones((3, 3, 96, 32))
    graph = poet_jax.large_convolutions(poet_jax.trace(convolve, image, kernel))
    (equation,) = [e for node in graph.nodes for e in node.equations]
    assert equation.lowering in list(lowerings.others(equation, False))


ways = st.builds(
    lowerings.Measured, st.floats(0.5, 2), st.sampled_from([0, 2**19, 2**22, 2**25])
)


@given(
    measured=st.lists(ways, min_size=1, max_size=4),
    room=st.none() | st.sampled_from([-1, 0, 2**19, 2**23, 2**25]),
)
def test_the_leanest_of_the_fast_ways_that_fit_is_chosen(measured, room):
    named = {str(number): x for number, x in enumerate(measured)}
    chosen = named[lowerings.choice(named, room)]
    if room is None:
        room = measured[0].workspace_bytes + lowerings.PATCHES_BYTES
    most_bytes = max(room, min(x.workspace_bytes for x in measured))
    assert chosen.workspace_bytes <= most_bytes
    for other in measured:
        if other.workspace_bytes <= most_bytes:
            assert chosen.seconds * lowerings.GAIN <= other.seconds
            if other.seconds <= chosen.seconds:
                assert chosen.workspace_bytes <= other.workspace_bytes + 2**20
    if measured[0].workspace_bytes <= most_bytes:
        assert chosen.seconds <= lowerings.SLOWER * measured[0].seconds


def needed(graph, workspace_bytes):
    """Bytes that no plan can do without at a node with such a workspace, at most."""
    return workspace_bytes + max(
        sum(graph.values[v].nbytes for v in {*graph.pinned, *n.reads, *n.writes})
        for n in graph.nodes
    )


def test_what_cannot_fit_the_budget_is_left_out(tmp_path, monkeypatch):
    """The lean way where the budget has no room for the fast one, else the fast one;
    both from what was measured once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    workspace_bytes = 2**24

    def measure(node, approximate):
        fast = lowerings.Measured(1.0, workspace_bytes)
        return {"xla": lowerings.Measured(2.0, 0), "im2col": fast}

    monkeypatch.setattr(lowerings, "measure", measure)
    graph = poet_jax.trace(convolve, IMAGES, PARAMS[0])
    enough = needed(graph, workspace_bytes)
    for budget, ways in (
        (enough, {lowerings.im2col}),
        (enough - 1, {None}),
        ("1KiB", {None}),
        (None, {None}),  # 16 MiB are far more than XLA takes
        (poet_jax.Budget(enough), {lowerings.im2col}),
    ):
        chosen = poet_jax.fastest(graph, budget=budget)
        assert {e.lowering for n in chosen.nodes for e in n.equations} == ways
        monkeypatch.setattr(lowerings, "measure", None)  # the file knows by now


def test_a_share_of_keep_all_is_refused():
    graph = poet_jax.trace(convolve, IMAGES, PARAMS[0])
    with pytest.raises(ValueError, match="within 30%.* takes bytes or a size. Type"):
        poet_jax.fastest(graph, budget="30%")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": "im2col"}', '{"a": {"xla": 1}}', '{"a": {}}']
)
def test_a_damaged_file_is_measured_again(text, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = poet_jax.machine.host_path().with_suffix(".lowerings.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    graph = poet_jax.trace(convolve, IMAGES, PARAMS[0])
    poet_jax.fastest(graph)
    assert '"xla"' in path.read_text()
