"""`mpidist run` starts a job, and starts it again after a death."""
