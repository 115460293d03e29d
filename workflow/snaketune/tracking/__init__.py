"""Training curves for TensorBoard, Weights & Biases, trackio and MLflow.

`curves.py` adds the trackers that the config names to a training, as callbacks of their own libraries.
"""
