"""Weights and optimizer states sharded over processes: FSDP2 and DeepSpeed's ZeRO."""
