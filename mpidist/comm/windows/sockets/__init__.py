"""Windows by TCP sockets, also for workers that join a running job."""
