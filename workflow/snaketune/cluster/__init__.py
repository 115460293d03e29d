"""At home on a cluster: what its partitions give, what a job asks of them, why one waits, when one has to end."""
