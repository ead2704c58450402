"""The input: datasets, their options, and how they are shared out over ranks.

Who reads what. One rank is one pipeline and one replica; n is the number of ranks, r that of this one, G the global
batch size. `experimental_distribute_dataset` takes the same dataset on every rank, with an `auto_shard_policy`:

    strategy                       num_input_pipelines, input_pipeline_id, num_replicas_in_sync
    MirroredStrategy               (n, r, n), the ranks of one node
    MultiWorkerMirroredStrategy    (n, r, n), the ranks of the job
    OneDeviceStrategy              (1, 0, 1): every rank reads all data, whatever the policy; FILE needs a file
    the default strategy           (1, 0, 1): likewise

    policy   a rank of MirroredStrategy and MultiWorkerMirroredStrategy sees
    OFF      all examples, in its own order where shuffles have no seed, in batches of G/n
    DATA     the r-th contiguous piece of every global batch; sizes differ by at most one, the first ranks get more
    FILE     the files number i with i mod n = r, as the reader is given them (`from_files`, or `list_files` followed by
             `interleave`), in batches of G/n; an error where there are fewer files than ranks, or none
    HINT     `shard(n, r)` where the dataset has `shard(SHARD_HINT, SHARD_HINT)`, in batches of G/n; as OFF where it
             has no such step. Under other policies the step does nothing
    AUTO     FILE where the dataset reads at least n files, else DATA

Where G is not divisible, the sizes of the ranks' batches take turns, so that every step has G examples as long as all
ranks have some. A rank that has none left gets empty batches. Errors are raised on every rank.

The position of an iterator can be loaded by another number of ranks: under DATA, FILE, HINT and AUTO the pass goes on
with no example repeated or left out, and the next pass is shared out to the new ranks. Under OFF ranks have no common
position but the number of steps.
"""

from __future__ import annotations

from mpidist.data.dataset import AUTOTUNE, Dataset
from mpidist.data.items.stream import INFINITE, UNKNOWN
from mpidist.data.options import DistributeOptions, Options
from mpidist.data.pipeline.files import SHARD_HINT
from mpidist.data.reading.element import ArraySpec
from mpidist.data.reading.readers import hdf5_reader, read_npy, read_npz
from mpidist.options import AutoShardPolicy

INFINITE_CARDINALITY = INFINITE
UNKNOWN_CARDINALITY = UNKNOWN

__all__ = [
    "AUTOTUNE",
    "INFINITE",
    "INFINITE_CARDINALITY",
    "SHARD_HINT",
    "UNKNOWN",
    "UNKNOWN_CARDINALITY",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DistributeOptions",
    "Options",
    "hdf5_reader",
    "read_npy",
    "read_npz",
]
