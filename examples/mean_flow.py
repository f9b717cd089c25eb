"""MeanFlow: a transformer that generates in one step, trained with a jvp through it.

    python examples/mean_flow.py

A flow carries noise (t = 1) to data (t = 0). The model says the mean velocity u of the
flow between two times r < t, so one evaluation goes all the way. What it has to be
follows from its own derivative along the flow (Geng et al. 2025, arXiv 2505.13447),

    u = v - (t - r) du/dt,    du/dt = v du/dz + du/dt at fixed z,

a Jacobian-vector product of the model, and so of its attention. Here data are closed
curves in the plane: sequences of points, which the model has to keep in order.
"""

import argparse
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray
from tqdm import tqdm

import eqx_attention as eqxa

POINTS, BATCH = 32, 64
LAYERS, HEADS, HEAD_DIM = 2, 4, 16
WIDTH = HEADS * HEAD_DIM
STEPS, LEARNING_RATE = 600, 3e-3

Curve = Float[Array, "points 2"]
Curves = Float[Array, "batch points 2"]
Time = Float[Array, ""]


class Layer(eqx.Module):
    """Attention between the points of a curve, then a perceptron for each."""

    norms: list[eqx.nn.LayerNorm]
    to_qkv: eqx.nn.Linear
    from_heads: eqx.nn.Linear
    mlp: eqx.nn.MLP

    def __init__(self, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, 3)
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]
        self.to_qkv = eqx.nn.Linear(WIDTH, 3 * WIDTH, key=keys[0])
        self.from_heads = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 2 * WIDTH, 1, jax.nn.gelu, key=keys[2])

    def __call__(self, x: Float[Array, "points width"]) -> Float[Array, "points width"]:
        qkv = jax.vmap(self.to_qkv)(jax.vmap(self.norms[0])(x))
        query, key, value = jnp.split(qkv.reshape(POINTS, 3 * HEADS, HEAD_DIM), 3, 1)
        seen = eqxa.attention(
            *(query, key, value),
            backend=eqxa.Backend.FLASH,
            differentiation=eqxa.Differentiation.BOTH,
        )
        x = x + jax.vmap(self.from_heads)(seen.reshape(POINTS, WIDTH))
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class MeanVelocity(eqx.Module):
    """The mean velocity between r and t of the flow that is at `curve` at t."""

    read: eqx.nn.Linear
    place: Float[Array, "points width"]
    clock: eqx.nn.MLP
    layers: list[Layer]
    write: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        keys = jax.random.split(key, 4 + LAYERS)
        self.read = eqx.nn.Linear(2, WIDTH, key=keys[0])
        self.place = 0.5 * jax.random.normal(keys[1], (POINTS, WIDTH))
        self.clock = eqx.nn.MLP(2, WIDTH, WIDTH, 1, jax.nn.gelu, key=keys[2])
        self.write = eqx.nn.Linear(WIDTH, 2, key=keys[3])
        self.layers = [Layer(k) for k in keys[4:]]

    def __call__(self, curve: Curve, r: Time, t: Time) -> Curve:
        times = self.clock(jnp.stack([t, t - r]))
        x = jax.vmap(self.read)(curve) + self.place + times[None]
        for layer in self.layers:
            x = layer(x)
        return jax.vmap(self.write)(x)


def sample(key: PRNGKeyArray) -> Curve:
    """A closed curve with three petals, of any size and turn."""
    of_size, of_turn = jax.random.split(key)
    size = jax.random.uniform(of_size, minval=0.8, maxval=1.4)
    turn = jax.random.uniform(of_turn, maxval=2 * np.pi)
    angle = jnp.linspace(0, 2 * np.pi, POINTS, endpoint=False)
    radius = size * (1 + 0.4 * jnp.cos(3 * angle))
    angle = angle + turn
    return radius[:, None] * jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=-1)


def loss_of(model: MeanVelocity, key: PRNGKeyArray) -> Float[Array, ""]:
    """How far the model is from what its derivative says, for one curve."""
    of_data, of_noise, of_times, of_kind = jax.random.split(key, 4)
    data = sample(of_data)
    noise = jax.random.normal(of_noise, data.shape)
    r, t = jnp.sort(jax.nn.sigmoid(jax.random.normal(of_times, (2,)) - 0.4))
    # Half of the times r = t, where u is the velocity itself.
    r = jnp.where(jax.random.bernoulli(of_kind), r, t)
    velocity = noise - data
    place = (1 - t) * data + t * noise
    found, change = jax.jvp(
        model, (place, r, t), (velocity, jnp.zeros_like(r), jnp.ones_like(t))
    )
    target = jax.lax.stop_gradient(velocity - (t - r) * change)
    error = jnp.mean((found - target) ** 2)
    return error / jax.lax.stop_gradient(error + 1e-2)  # the paper's adaptive weight


def train(model: MeanVelocity) -> tuple[MeanVelocity, list[float]]:
    """The trained model, and the distance of what it generates to data, at times."""
    optimiser = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model: MeanVelocity, state: optax.OptState, key: PRNGKeyArray):
        def loss(model: MeanVelocity) -> Array:
            return jnp.mean(jax.vmap(lambda key: loss_of(model, key))(keys))

        keys = jax.random.split(key, BATCH)
        updates, state = optimiser.update(eqx.filter_grad(loss)(model), state)
        return eqx.apply_updates(model, updates), state

    distances: list[float] = []
    with tqdm(total=STEPS, unit="step", file=sys.stdout) as progress:
        for number, key in enumerate(jax.random.split(jax.random.key(1), STEPS)):
            model, state = step(model, state, key)
            progress.update()
            if number % 20 == 19:
                distances.append(distance(model))
                progress.set_postfix(distance=f"{distances[-1]:.3f}")
    return model, distances


@eqx.filter_jit
def generate(model: MeanVelocity, key: PRNGKeyArray) -> Curves:
    """Curves from noise, each by one evaluation of the model."""
    noise = jax.random.normal(key, (BATCH, POINTS, 2))
    zero, one = jnp.asarray(0.0), jnp.asarray(1.0)
    return noise - jax.vmap(lambda x: model(x, zero, one))(noise)


def distance(model: MeanVelocity) -> float:
    """From generated curves to the nearest of many from the data: 0 if all are real."""
    data = jax.vmap(sample)(jax.random.split(jax.random.key(2), 4096))
    flat, curves = (x.reshape(len(x), -1) for x in (data, generate(model, KEY)))
    squares = jnp.sum((curves[:, None] - flat[None]) ** 2, axis=-1) / POINTS
    return float(jnp.mean(jnp.sqrt(jnp.min(squares, axis=1))))


KEY = jax.random.key(3)


def plot(model: MeanVelocity, distances: list[float], path: str) -> None:
    """Draws how training went, and curves: generated ones above, real ones below."""
    figure = plt.figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(2, 3))
    axis = left.subplots()
    axis.plot(20 * np.arange(1, len(distances) + 1), distances)
    axis.set(xlabel="step", ylabel="distance to the nearest real curve", ylim=(0, None))
    real = jax.vmap(sample)(jax.random.split(jax.random.key(4), 5))
    drawn = generate(model, KEY), real
    for row, curves in zip(right.subplots(2, 5), drawn, strict=True):
        for axis, curve in zip(row, np.asarray(curves), strict=False):
            axis.plot(*np.concatenate([curve, curve[:1]]).T)
            axis.set(xlim=(-2.2, 2.2), ylim=(-2.2, 2.2), xticks=[], yticks=[])
            axis.set_aspect("equal")
    right.suptitle("generated in one step, and real")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains the model and draws what it generates."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default="mean_flow.png", help="where to draw")
    path = parser.parse_args().plot
    model = MeanVelocity(jax.random.key(0))
    before = distance(model)
    model, distances = train(model)
    print(
        f"One step puts a curve {distances[-1]:.2f} from the nearest real one; before "
        f"training it was {before:.2f}."
    )
    plot(model, distances, path)
    print(f"Training, and generated curves, are drawn in {path}.")


if __name__ == "__main__":
    main()
