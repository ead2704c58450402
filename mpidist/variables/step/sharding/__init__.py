"""An optimizer's state in shards: which node has what, and the step that updates it there."""
