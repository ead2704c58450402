"""Layers that are split over the logical devices of a replica, and their gradients.

Call them inside `run` of a `TPUStrategy`, on all logical devices of the replica. Each returns `(result, backward)`.
`backward(gradient)` takes the gradient of the result and returns the gradients of the array arguments; the gradient of
a tile is a tile. Under a strategy without logical devices the layers are not split.

    w1 = mpidist.Variable(..., partition_dimensions=[1, 2])              # columns
    w2 = mpidist.Variable(..., partition_dimensions=[2, 1])              # rows
    ...
    hidden, hidden_backward = mpidist.parallel.column_parallel_matmul(x, w1.value())
    logits, logits_backward = mpidist.parallel.row_parallel_matmul(hidden, w2.value())
    ...
    hidden_gradient, w2_gradient = logits_backward(logits_gradient)
    x_gradient, w1_gradient = hidden_backward(hidden_gradient)
"""

from typing import TYPE_CHECKING, NoReturn

from mpidist.missing import no_attribute
from mpidist.parallel.matmul import column_parallel_matmul, row_parallel_matmul
from mpidist.parallel.vocabulary import vocabulary_parallel_embedding, vocabulary_parallel_softmax_cross_entropy

__all__ = [
    "column_parallel_matmul",
    "row_parallel_matmul",
    "vocabulary_parallel_embedding",
    "vocabulary_parallel_softmax_cross_entropy",
]


# Hidden from type checkers, which would otherwise accept any name as an attribute of this module.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
