"""A deep equilibrium model: one layer of attention, applied until nothing changes.

    python examples/deep_equilibrium.py

Each set of points in the plane comes from a few clusters, blurred by noise. The model
is to say of each point where its cluster's centre is. Its hidden state is the fixed
point of one layer (Bai et al. 2019, arXiv 1909.01377), which optimistix finds: states
attend to the points until they stay where they are, as in a Hopfield network (Ramsauer
et al. 2020, arXiv 2008.02217), where each such step lowers an energy. The gradient is
that of the implicit function: a linear system with the layer's Jacobian, of which
lineax only asks for products. Memory does not grow with the number of steps.
"""

import argparse
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import matplotlib.pyplot as plt
import numpy as np
import optax
import optimistix as optx
from jaxtyping import Array, Float, Int, PRNGKeyArray
from tqdm import tqdm

import eqx_attention as eqxa

CLUSTERS, POINTS, BATCH, NOISE = 4, 48, 16, 0.3
HEADS, HEAD_DIM = 2, 16
STEPS, LEARNING_RATE = 200, 3e-3

Points = Float[Array, "batch points 2"]
State = Float[Array, "batch points heads dim"]


class Equilibrium(eqx.Module):
    """Points in, points out; between them the fixed point of `layer`."""

    embed: eqx.nn.Linear
    log_scale: Float[Array, ""]
    write: eqx.nn.Linear

    def __init__(self, key: PRNGKeyArray) -> None:
        of_embed, of_write = jax.random.split(key)
        width = HEADS * HEAD_DIM
        self.embed = eqx.nn.Linear(2, width, key=of_embed)
        self.log_scale = jnp.asarray(1.0)
        self.write = eqx.nn.Linear(width, 2, key=of_write)

    def layer(self, state: State, stored: State) -> State:
        """One application: each state moves to a mean of the stored ones near it."""
        scale = jnp.exp(self.log_scale)
        # With it, a logit falls with the distance: -scale |state - stored|^2 / 2.
        norms = jnp.moveaxis(jnp.sum(stored**2, axis=-1), 1, 2)
        return eqxa.attention(
            *(state, stored, stored),
            softmax_scale=scale,
            bias=-scale * norms[:, :, None] / 2,
            backend=eqxa.Backend.FLASH,
            # The solvers need the Jacobian's products with vectors, from both sides.
            differentiation=eqxa.Differentiation.BOTH,
        )

    def __call__(self, points: Points) -> tuple[Points, Int[Array, ""]]:
        """Where each point's centre is, and the number of steps that took."""
        stored = over_tokens(self.embed, points)
        stored = stored.reshape(*stored.shape[:-1], HEADS, HEAD_DIM)
        solution = optx.fixed_point(
            self.layer,
            optx.FixedPointIteration(rtol=1e-3, atol=1e-3),
            stored,
            args=stored,
            adjoint=optx.ImplicitAdjoint(lx.GMRES(rtol=1e-3, atol=1e-3)),
            max_steps=500,
        )
        state = solution.value.reshape(*points.shape[:-1], HEADS * HEAD_DIM)
        return over_tokens(self.write, state), solution.stats["num_steps"]


def over_tokens(function: eqx.Module, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """A function of one token, for all of them."""
    return jax.vmap(jax.vmap(function))(x)


def sample(key: PRNGKeyArray) -> tuple[Points, Points]:
    """Sets of noisy points, and the centres that they belong to."""
    of_centres, of_choice, of_noise = jax.random.split(key, 3)
    centres = jax.random.uniform(of_centres, (BATCH, CLUSTERS, 2), minval=-3, maxval=3)
    choice = jax.random.randint(of_choice, (BATCH, POINTS, 1), 0, CLUSTERS)
    targets = jnp.take_along_axis(centres, choice, axis=1)
    return targets + NOISE * jax.random.normal(of_noise, targets.shape), targets


def distance(points: Points, targets: Points) -> Float[Array, ""]:
    """The root of the mean square distance."""
    return jnp.sqrt(jnp.mean(jnp.sum((points - targets) ** 2, axis=-1)))


def train(model: Equilibrium) -> tuple[Equilibrium, list[float]]:
    """The trained model, and the distance to the centres at each step."""
    optimiser = optax.adam(optax.cosine_decay_schedule(LEARNING_RATE, STEPS))
    state = optimiser.init(eqx.filter(model, eqx.is_array))

    def loss(
        model: Equilibrium, points: Points, targets: Points
    ) -> tuple[Array, Array]:
        found, num_steps = model(points)
        return distance(found, targets), num_steps

    @eqx.filter_jit
    def step(model: Equilibrium, state: optax.OptState, key: PRNGKeyArray):
        points, targets = sample(key)
        gradient_of = eqx.filter_value_and_grad(loss, has_aux=True)
        (value, num_steps), gradient = gradient_of(model, points, targets)
        updates, state = optimiser.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value, num_steps

    distances: list[float] = []
    with tqdm(total=STEPS, unit="step", file=sys.stdout) as progress:
        for key in jax.random.split(jax.random.key(1), STEPS):
            model, state, value, num_steps = step(model, state, key)
            distances.append(float(value))
            progress.set_postfix(distance=f"{value:.3f}", depth=int(num_steps))
            progress.update()
    return model, distances


def plot(model: Equilibrium, distances: list[float], path: str) -> None:
    """Draws how training went, and where the model puts the points of a new set."""
    points, targets = sample(jax.random.key(2))
    found, _ = eqx.filter_jit(model)(points)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    axes[0].plot(distances)
    blur = NOISE * np.sqrt(2)
    axes[0].axhline(blur, color="gray", linestyle=":", label="of the points themselves")
    axes[0].set(xlabel="step", ylabel="distance to the centre", ylim=(0, None))
    axes[0].legend()
    for x, label, style in (
        (points[0], "points", {"s": 12, "color": "silver"}),
        (found[0], "the model's centres", {"s": 12}),
        (targets[0], "true centres", {"s": 90, "marker": "x", "color": "black"}),
    ):
        axes[1].scatter(*np.asarray(x).T, label=label, **style)
    axes[1].set_aspect("equal")
    axes[1].legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains the model and draws what it does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default="deep_equilibrium.png", help="where to draw")
    path = parser.parse_args().plot
    model, distances = train(Equilibrium(jax.random.key(0)))
    last = np.mean(distances[-20:])
    print(
        f"Noise puts the points {NOISE * np.sqrt(2):.3f} from their centres; what the "
        f"model finds is {last:.3f} from them."
    )
    plot(model, distances, path)
    print(f"Training, and a new set of points, are drawn in {path}.")


if __name__ == "__main__":
    main()
