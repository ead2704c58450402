"""JAX programs trained by a strategy: gradients are averaged over the ranks inside the compiled step.

    strategy = mpidist.MultiWorkerMirroredStrategy()
    optimizer = mpidist.jax.distribute(optax.adam(1e-3))
    params = mpidist.jax.broadcast(params)

The guide is `docs/frameworks/jax.md`.
"""

from mpidist.jax.collectives import all_gather as all_gather
from mpidist.jax.collectives import all_reduce as all_reduce
from mpidist.jax.collectives import broadcast as broadcast
from mpidist.jax.collectives import reduce_scatter as reduce_scatter
from mpidist.jax.optimizer import distribute as distribute
from mpidist.jax.state import State as State
from mpidist.xla.threads import share_launched as _share_launched

__all__ = ["State", "all_gather", "all_reduce", "broadcast", "distribute", "reduce_scatter"]

_share_launched()
