"""Kinds of variables: mirrored, ON_READ, served by parameter servers, sharded."""
