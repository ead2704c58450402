"""Cross-device operations: reductions with tf.distribute's names, and the user's own."""
