"""The participants of a program: clusters, the resolvers that describe them, tasks, and devices."""
