"""Checks before a training (`preflight`), and what limits the speed of one (`doctor`).

`preflight` finds in seconds what would stop or slow down the trainings of a family. `doctor` times short trainings (`timing`),
one per setting that it changes, and names the limit with the measured gain of each change (`bottleneck`).
"""
