"""The names of `tf.tpu` that code for `TPUStrategy` uses: `mpidist.tpu.experimental`."""

from mpidist.tpu import experimental as experimental
