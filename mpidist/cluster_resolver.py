"""The cluster resolvers, under the names of `tf.distribute.cluster_resolver`."""

from mpidist.cluster.mpi import MPIClusterResolver
from mpidist.cluster.resolver import ClusterResolver
from mpidist.cluster.simple import SimpleClusterResolver
from mpidist.cluster.tf_config import TFConfigClusterResolver
from mpidist.cluster.union import UnionResolver

__all__ = [
    "ClusterResolver",
    "MPIClusterResolver",
    "SimpleClusterResolver",
    "TFConfigClusterResolver",
    "UnionResolver",
]
