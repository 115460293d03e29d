"""The training loop: trainers on transformers' Trainer, data order, prefetch, throughput and preemption."""
