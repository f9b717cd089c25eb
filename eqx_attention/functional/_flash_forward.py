"""The forward pass of flash attention: chunks of queries against chunks of keys.

The scheme is that of Dao et al. 2022 (arXiv 2205.14135) and Dao 2023 (2307.08691): for
one chunk of queries after the other, a running softmax over the chunks of keys that
hold work. Nothing that is kept grows faster than the length.
"""

from ._block import attend_tile
from ._online_softmax import SoftmaxState, no_keys
from ._problem import Problem
from ._rows import Cut, Rows, by_rows
from ._tiles import TileSizes


def forward(problem: Problem, sizes: TileSizes) -> SoftmaxState:
    """The state of every query after all keys. `sizes` are at most the lengths."""
    return by_rows(_attend_rows, problem, sizes)


def _attend_rows(problem: Problem, rows: Rows) -> SoftmaxState:
    def step(state: SoftmaxState, cut: Cut) -> SoftmaxState:
        return attend_tile(
            *(state, cut.operands.with_scaled_query(), problem.rules),
            *(problem.dropout, cut.tile, cut.allowed),
        )[0]

    shape = (*rows.query.shape[:-1], problem.operands.value.shape[-1])
    return rows.fold(step, no_keys(shape, problem.operands.accumulator))
