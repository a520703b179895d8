"""A PyTorch module on digits within a budget, beside jax.jit.

Command:  python -m experiments.front_ends.pytorch_digits
Needs:    pip install -e ".[front_ends]", of that only torchax and its PyTorch.
Expect:   about a minute; a peak below 85 % of keep-all's; the losses of jax.jit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torchax
from torch import nn
from torchax.interop import jax_view, torch_view

from experiments.front_ends import digits

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.Flatten(),
    nn.Dropout(0.1),
    nn.Linear(1024, 10),
)


def arrays(named):
    return {name: jnp.array(tensor.detach().numpy()) for name, tensor in named}


params, buffers = arrays(model.named_parameters()), arrays(model.named_buffers())
optimizer = optax.adam(1e-3)
state = params, buffers, optimizer.init(params), jnp.array(0)


def loss_of(params, buffers, seed, images, labels):
    params, buffers, seed, images = torch_view((params, buffers, seed, images))
    with torchax.default_env() as env:
        env.manual_seed(seed)  # else dropout draws the same mask in every step
        weights = {**params, **buffers}  # the module writes its statistics into it
        logits = torch.func.functional_call(model, weights, images.permute(0, 3, 1, 2))
    logits, buffers = jax_view((logits, buffers))
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, buffers


def step(state, images, labels):
    params, buffers, moments, seed = state
    gradient = jax.value_and_grad(loss_of, has_aux=True)
    (loss, buffers), gradients = gradient(params, buffers, seed, images, labels)
    updates, moments = optimizer.update(gradients, moments, params)
    params = optax.apply_updates(params, updates)
    return (params, buffers, moments, seed + 1), loss


def trained(state):
    """The module again, with the parameters and buffers of the last step."""
    weights = {**state[0], **state[1]}
    tensors = {name: torch.from_numpy(np.array(x)) for name, x in weights.items()}
    model.load_state_dict(tensors)
    return model


if __name__ == "__main__":
    digits.main(step, state)
