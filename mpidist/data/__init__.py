"""Input: datasets, their options, and the rules by which ranks share them.

One rank is one input pipeline and one replica. In the tables, n is the number of ranks, r the number of this rank, and
G the global batch size. `experimental_distribute_dataset` takes the same dataset on every rank:

    strategy                       num_input_pipelines, input_pipeline_id, num_replicas_in_sync
    MirroredStrategy               (n, r, n), the ranks of one node
    MultiWorkerMirroredStrategy    (n, r, n), the ranks of the job
    OneDeviceStrategy              (1, 0, 1): every rank reads all data, under every policy; FILE needs a file
    the default strategy           (1, 0, 1): likewise

The `auto_shard_policy` of the dataset says what a rank of MirroredStrategy and MultiWorkerMirroredStrategy reads:

    policy   data of rank r
    OFF      all examples, in batches of G/n; each rank has its own order where a shuffle has no seed
    DATA     the r-th contiguous piece of every global batch; sizes differ by at most one, the first ranks get more
    FILE     every n-th file beginning with number r, in batches of G/n; an error where there are fewer files than
             ranks, or none. Files are counted in the order of `from_files`, or in that in which `interleave` gets
             them after `list_files`
    HINT     `shard(n, r)` in the place of `shard(SHARD_HINT, SHARD_HINT)`, in batches of G/n; as OFF without this
             step. Under other policies the step does nothing
    AUTO     FILE where the dataset reads at least n files and nothing else, else DATA; also DATA where it is numbered
             by `enumerate`, or zips lists of files that differ

FILE shards only files: each rank reads all other data, from its beginning. So an array that is zipped with files is
paired with other examples on other ranks, and one that is concatenated with files occurs once per rank.

Where n does not divide G, the sizes of a rank's batches alternate, so that every step has G examples as long as all
ranks have data. A rank without data gets empty batches. Errors are raised on every rank.

Another number of ranks can load the position of an iterator: under DATA, FILE, HINT and AUTO the pass continues with no
example repeated or left out, and the next pass is shared by the new ranks. Under OFF the ranks have nothing in common
but the number of steps.

Words of this package: an *item* identifies an example that is not read yet; a *stream* orders items, a *source*
reads them, and a *pipeline* is both. A *piece* is a rank's rows of one global batch, a *shard* every n-th item of a
stream, and a *share* all that a rank reads. A *reader* is a rank that takes part in sharing; the reader of `from_files`
is a function that opens a file.

The modules, each importing only those named after it: `distribution` (shares of ranks), `dataset`, `transformations`
(a module each, and a line in `Dataset`), `dataset_base`, `pipeline`, `reading` (from items to arrays), `items` (the
order of examples; no reading, no communication).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from mpidist.data.dataset import Dataset
from mpidist.data.items.files import SHARD_HINT
from mpidist.data.items.stream import INFINITE, UNKNOWN
from mpidist.data.options import DistributeOptions, Options
from mpidist.data.reading.element import ArraySpec, DatasetSpec
from mpidist.data.reading.readers import hdf5_reader, read_npy, read_npz
from mpidist.data.transformations.calls import AUTOTUNE
from mpidist.missing import no_attribute
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
    "DatasetSpec",
    "DistributeOptions",
    "Options",
    "hdf5_reader",
    "read_npy",
    "read_npz",
]


# Hidden from type checkers, which would take any name for one of the module's.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> NoReturn:
        no_attribute(__name__, name)
