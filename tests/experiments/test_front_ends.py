"""Models of other front ends: their losses, and what of them cannot be traced."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import STAGES

import poet_jax
from experiments.front_ends import digits

PACKAGES = {"equinox": "equinox", "keras": "keras", "pytorch": "torchax"}
OPTIONS = {
    "device": poet_jax.devices.JETSON_TX2,
    "planner": poet_jax.greedy,
    "executor": STAGES,
}
IMAGES = np.linspace(-1, 1, 4 * 64, dtype=np.float32).reshape(4, 8, 8, 1)


def load(front_end):
    """Its example; the test is skipped where its package is not installed."""
    if importlib.util.find_spec(PACKAGES[front_end]) is None:
        pytest.skip(f"{PACKAGES[front_end]} is not installed")
    return importlib.import_module(f"experiments.front_ends.{front_end}_digits")


def logits_of(front_end, model):
    """The logits [4, 10] of `IMAGES` as the front end itself computes them."""
    if front_end == "equinox":
        return jax.vmap(model)(jnp.moveaxis(IMAGES, -1, 1))
    if front_end == "keras":
        return model(IMAGES, training=False)
    import torch

    return model.eval()(torch.from_numpy(IMAGES).permute(0, 3, 1, 2)).detach()


@pytest.mark.parametrize("front_end", PACKAGES)
def test_an_example_trains_as_with_jit(front_end):
    """In the least memory, with the losses of `jax.jit`, and the model that comes back
    is another than before."""
    example = load(front_end)
    before = np.asarray(logits_of(front_end, example.model))
    if front_end == "pytorch":
        example.model.train()

    def train(budget):
        return digits.train(example.step, example.state, budget, 3, **OPTIONS)

    with pytest.raises(poet_jax.BudgetTooSmall) as caught:
        train(1)
    state, losses, schedule = train(caught.value.smallest_bytes)
    assert schedule.usage.peak_bytes < schedule.baseline.peak_bytes
    within, expected = np.transpose(losses)
    np.testing.assert_allclose(within, expected, rtol=1e-5)
    assert within[-1] < within[0]
    after = np.asarray(logits_of(front_end, example.trained(state)))
    assert np.isfinite(after).all() and np.abs(after - before).max() > 1e-3


def equinox_decides():
    import equinox as eqx

    class Decides(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            return x * self.weight if x.sum() > 0 else x

    return lambda x: Decides(jnp.ones(8))(x)


def keras_leaves_jax():
    import keras

    class LeavesJax(keras.layers.Layer):
        def call(self, x):
            return x * keras.ops.convert_to_numpy(x).max()

    layer = LeavesJax()
    layer.build((4, 8, 8, 1))
    return lambda x: layer.stateless_call([], [], x)[0]


def pytorch(forward):
    """The module with this method, as a function of arrays."""
    import torch
    import torchax
    from torchax.interop import jax_view, torch_view

    module = type("Module", (torch.nn.Module,), {"forward": forward})()

    def fun(x):
        with torchax.default_env():
            result = torch.func.functional_call(module, {}, torch_view(x))
        return jax_view(result)

    return fun


def pytorch_leaves_jax():
    def forward(self, x):
        return x * float(x.numpy().max())

    return pytorch(forward)


def pytorch_decides():
    def forward(self, x):
        return x if x.sum() > 0 else -x

    return pytorch(forward)


def pytorch_lacks_an_operator():
    def forward(self, x):
        import torch.nn.functional as F

        samples = x[:, :1, :2, 0]
        return F.fractional_max_pool2d(x, 2, (4, 1), _random_samples=samples)

    return pytorch(forward)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (equinox_decides, "in __call__: Attempted boolean conversion"),
        (keras_leaves_jax, "in call: The numpy.ndarray conversion"),
        (pytorch_leaves_jax, "in forward: The numpy.ndarray conversion"),
        (pytorch_decides, "in forward: Abstract tracer value"),
        (pytorch_lacks_an_operator, "in forward: .*aten::fractional_max_pool2d"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_traced_is_named_before_anything_is_compiled(make, says):
    load(make.__name__.partition("_")[0])
    model = make()

    def step(x):
        return model(x).sum()

    compiled = []

    def listen(event, seconds, **_):
        if "compile" in event and "trace" not in event:
            compiled.append(event)

    scheduled = poet_jax.schedule(step, "85%", **OPTIONS)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with pytest.raises(poet_jax.CannotTrace, match=says) as error:
            scheduled(IMAGES)
        assert "test_front_ends.py" in str(error.value) and not compiled
        jax.jit(lambda x: x + len(compiled)).lower(IMAGES).compile()
        assert compiled  # the listener hears what is compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
