"""Training curves for TensorBoard, Weights & Biases, trackio and MLflow."""
