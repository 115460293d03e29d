"""Curves of trainings for TensorBoard, Weights & Biases, trackio and MLflow."""
