"""Cluster resolvers, with the names of `tf.distribute.cluster_resolver`."""

from typing import TYPE_CHECKING, NoReturn

from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.resolver import ClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.resolvers.tpu import TPUClusterResolver
from mpidist.cluster.resolvers.union import UnionResolver
from mpidist.missing import no_attribute

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "SlurmClusterResolver",
    "TFConfigClusterResolver",
    "TPUClusterResolver",
    "UnionResolver",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
