"""Several hosts on one machine, made of Linux namespaces, for tests of jobs on more than one host.

    with VirtualHosts(2) as hosts:
        result = hosts.run((2, 2), program)        # two ranks on each of two hosts

Each host has a name, an address, processes, node memory (`/dev/shm`) and interfaces of its own; files are shared, as
on a cluster with a common file system. `VirtualHosts` (in `virtual_hosts.py`) is what tests use. It starts three small
programs, which need nothing but Python itself:

- `rack.py` has a bridge, starts the hosts and connects them to it;
- `host.py` is the first process of a host and runs the commands that it is sent;
- `shell.py` sends one: it stands in for ssh, so that `mpirun` starts ranks on a host as on any other.

The rack is the first process of a process namespace. It ends when its standard input does, so also when the test run is
killed; the kernel then ends everything that runs on the hosts and removes their interfaces, the bridge and all mounts.
"""
