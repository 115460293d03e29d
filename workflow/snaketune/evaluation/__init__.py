"""Evaluation: held-out loss, exact match, preference accuracy, lm-eval tasks, samples.

The stage `eval` scores one model; `model_scores.py` lists what it measures, each score with its interval (score_intervals.py).
The stage `race` compares the variants of a grid while they train, and pauses those that are clearly worse.
"""
