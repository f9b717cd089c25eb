"""Continuous batching: requests come, are decoded together, and leave, at any time.

Each request takes a slot of the batch. Its prompt is read in chunks, while others go on
generating; when it has its tokens, its pages of the cache are free for the next one. At
the end each request is run alone, and must have got the same tokens.

    python examples/serve.py
"""

import argparse
import dataclasses
import statistics
import sys
import time
from collections import deque
from typing import TypeAlias

import equinox as eqx
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import smollm2
from jaxtyping import Array, Int
from tqdm import tqdm

import eqx_attention as eqxa

# Seconds until arrival, tokens of the prompt and tokens generated: twelve requests of
# the Azure LLM inference trace of 2023, conversations (Patel et al. 2024, Splitwise),
# https://github.com/Azure/AzurePublicDataset, CC-BY 4.0.
TRACE = [
    (0.0, 890, 402),
    (0.0, 1192, 419),
    (0.1, 899, 403),
    (0.3, 163, 224),
    (0.5, 181, 212),
    (0.9, 416, 88),
    (0.9, 1163, 426),
    (1.1, 243, 14),
    (1.2, 1041, 428),
    (1.2, 1350, 146),
    (1.3, 1104, 396),
    (1.4, 1127, 426),
]
# A CPU is some way from the machines of the trace: fewer tokens, in more time.
FEWER, SLOWER = 8, 8

SLOTS, CHUNK = 4, 32
PAGE_SIZE, NUM_PAGES = 16, 40

TEXT = """A cache of keys and values holds what a model has read. Sequences of many
lengths share it in pages, as programs share the memory of a computer. """

Model: TypeAlias = smollm2.SmolLM2


@dataclasses.dataclass
class Request:
    """What is asked for, and how far it has come."""

    arrival: float
    prompt: list[int]
    num_wanted: int
    generated: list[int] = dataclasses.field(default_factory=list)
    num_read: int = 0
    finished: float = 0.0

    @property
    def num_pages(self) -> int:
        """The pages it needs in the end."""
        return -(-(len(self.prompt) + self.num_wanted) // PAGE_SIZE)

    @property
    def done(self) -> bool:
        """Whether it has all its tokens."""
        return len(self.generated) == self.num_wanted

    def next_tokens(self) -> list[int]:
        """What the model is to read next: a part of the prompt, or the last token."""
        if self.num_read < len(self.prompt):
            return self.prompt[self.num_read : self.num_read + CHUNK]
        return self.generated[-1:]


@eqx.filter_jit(donate="all-except-first")
def step(
    model: Model, tokens: Array, num_tokens: Array, caches: eqxa.PagedKVCache
) -> tuple[Int[Array, " slots"], eqxa.PagedKVCache]:
    """The likeliest token after those that each slot reads."""
    hidden, caches = model.extend(tokens, num_tokens, caches)
    last = jnp.maximum(num_tokens - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
    return jnp.argmax(model.logits(hidden), axis=-1), caches


@eqx.filter_jit(donate="all")
def free(caches: eqxa.PagedKVCache, slot: Int[Array, ""]) -> eqxa.PagedKVCache:
    """The caches of all layers without the sequence in `slot`."""
    return eqx.filter_vmap(lambda cache: cache.free(slot))(caches)


class Server:
    """The slots of a batch, and the caches of all layers."""

    def __init__(self, model: Model) -> None:
        """With nothing in the slots."""
        config = model.config
        most = max(-(-(p + g) // FEWER) for _, p, g in TRACE)

        def init() -> eqxa.PagedKVCache:
            return eqxa.PagedKVCache.init(
                *(NUM_PAGES, PAGE_SIZE, SLOTS, -(-most // PAGE_SIZE) + 1),
                *(config.num_kv_heads, config.head_dim),
            )

        self.model = model
        self.caches = eqx.filter_vmap(init, axis_size=config.num_layers)()
        self.slots: list[Request | None] = [None] * SLOTS

    @property
    def running(self) -> list[Request]:
        """The requests in the slots."""
        return [request for request in self.slots if request is not None]

    def admit(self, request: Request) -> bool:
        """Takes a request, if there is a slot and pages enough for all its tokens."""
        reserved = sum(other.num_pages for other in self.running)
        if None not in self.slots or reserved + request.num_pages > NUM_PAGES:
            return False
        self.slots[self.slots.index(None)] = request
        return True

    def advance(self) -> list[Request]:
        """Each request reads its next tokens; those that are done leave."""
        parts = [[] if r is None else r.next_tokens() for r in self.slots]
        # Two programs: one token for each slot, or up to a chunk.
        rows = 1 if max(map(len, parts)) == 1 else CHUNK
        tokens = np.zeros((SLOTS, rows), np.int32)
        for slot, part in enumerate(parts):
            tokens[slot, : len(part)] = part
        num_tokens = np.array([len(part) for part in parts], np.int32)
        following, self.caches = step(
            self.model, jnp.asarray(tokens), jnp.asarray(num_tokens), self.caches
        )
        left = []
        for slot, token in enumerate(np.asarray(following)):
            request = self.slots[slot]
            if request is None:
                continue
            request.num_read += len(parts[slot])
            if request.num_read >= len(request.prompt):
                request.generated.append(int(token))
            if request.done:
                self.caches = free(self.caches, jnp.asarray(slot))
                self.slots[slot] = None
                left.append(request)
        return left

    @property
    def pages_used(self) -> int:
        """Pages that hold tokens; all layers hold the same."""
        return NUM_PAGES - int((self.caches.ref_counts[0] == 0).sum())


def requests(tokenizer: smollm2.Tokenizer) -> list[Request]:
    """The requests of the trace, each with a prompt of its own."""
    text = tokenizer.encode(TEXT * 20).ids
    found = []
    for i, (arrival, prompt, generated) in enumerate(TRACE):
        start, length = 7 * i, -(-prompt // FEWER)
        found.append(
            Request(
                arrival * SLOWER, text[start : start + length], -(-generated // FEWER)
            )
        )
    return found


def run(server: Server, asked: list[Request]) -> list[tuple[int, int]]:
    """Serves all requests as they arrive; pages and slots in use after each step."""
    coming, waiting, occupancy = deque(asked), deque[Request](), []
    total = sum(len(r.prompt) + r.num_wanted for r in asked)
    start = time.perf_counter()
    with tqdm(total=total, unit="token", file=sys.stdout) as progress:
        while coming or waiting or server.running:
            now = time.perf_counter() - start
            while coming and coming[0].arrival <= now:
                waiting.append(coming.popleft())
            while waiting and server.admit(waiting[0]):
                waiting.popleft()
            if not server.running:
                time.sleep(0.01)
                continue
            before = sum(r.num_read + len(r.generated) for r in asked)
            for request in server.advance():
                request.finished = time.perf_counter() - start
            occupancy.append((server.pages_used, len(server.running)))
            after = sum(r.num_read + len(r.generated) for r in asked)
            progress.update(min(after - before, total - progress.n))
            progress.set_postfix(running=len(server.running), waiting=len(waiting))
    return occupancy


def same_alone(model: Model, request: Request) -> bool:
    """Whether a request gets the same tokens when it is run alone."""
    server = Server(model)
    alone = Request(0.0, request.prompt, request.num_wanted)
    server.admit(alone)
    while server.running:
        server.advance()
    return alone.generated == request.generated


def plot(occupancy: list[tuple[int, int]], path: str) -> None:
    """Draws how full the cache and the batch were."""
    figure, axes = plt.subplots(2, 1, sharex=True, figsize=(7, 4), layout="constrained")
    pages, slots = zip(*occupancy, strict=True)
    for axis, used, most, label in (
        (axes[0], pages, NUM_PAGES, "pages in use"),
        (axes[1], slots, SLOTS, "requests running"),
    ):
        axis.step(range(len(used)), used, where="post")
        axis.axhline(most, color="gray", linestyle=":")
        axis.set(ylabel=label, ylim=(0, most * 1.05))
    axes[1].set_xlabel("step")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Serves the trace, prints what it took, and runs each request alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default="serve.png", help="where the plot goes")
    path = parser.parse_args().plot
    reader = smollm2.open_weights()
    model, tokenizer = smollm2.load_model(reader), smollm2.load_tokenizer(reader)
    asked = requests(tokenizer)
    print("Compiling, by a first request.")
    same_alone(model, Request(0.0, asked[0].prompt, 2))
    start = time.perf_counter()
    occupancy = run(Server(model), asked)
    seconds = time.perf_counter() - start
    prompt = sum(len(r.prompt) for r in asked)
    generated = sum(len(r.generated) for r in asked)
    latency = statistics.median(r.finished - r.arrival for r in asked)
    most = max(pages for pages, _ in occupancy)
    print(
        f"{len(asked)} requests in {seconds:.1f} s: {prompt / seconds:.0f} tokens of "
        f"prompts and {generated / seconds:.0f} generated tokens a second.\n"
        f"From arrival to the last token: {latency:.1f} s (median).\n"
        f"At most {most} of {NUM_PAGES} pages were used."
    )
    plot(occupancy, path)
    print(f"How full the cache was is drawn in {path}.")
    same = [
        same_alone(model, request)
        for request in tqdm(asked, unit="request", desc="alone", file=sys.stdout)
    ]
    print(f"{sum(same)} of {len(same)} requests: the same tokens alone.")
    if not all(same):
        sys.exit(1)


if __name__ == "__main__":
    main()
