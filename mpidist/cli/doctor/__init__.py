"""`mpidist doctor`: examines the machine, the ranks and the cluster, and prints fixes for what is wrong."""
