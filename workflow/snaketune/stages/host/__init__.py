"""The host that a job runs on: locks, leases, GPU slots, launch commands, disk errors."""
