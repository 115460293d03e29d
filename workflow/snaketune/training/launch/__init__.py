"""Launch worker processes of a training: start them, watch them, retry after out-of-memory, requeue after preemption."""
