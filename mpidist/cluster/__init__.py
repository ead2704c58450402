"""Who takes part: clusters, the resolvers that find them, tasks, and devices."""
