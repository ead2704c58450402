"""The start of a job, when no rank knows the others yet: who has not come, who looks, and what is said of it."""
