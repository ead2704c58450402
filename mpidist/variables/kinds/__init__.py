"""Kinds of variables: mirrored, ON_READ, served, sharded."""
