"""The batch plan of a training and its calibration, and the check that a training fits its machine."""
