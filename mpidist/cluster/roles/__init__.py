"""Roles of ranks: chief, worker, parameter server or evaluator."""
