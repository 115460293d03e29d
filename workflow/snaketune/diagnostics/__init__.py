"""Checks before a training (`preflight`), what limits the speed of one (`doctor`), and checks of a finished one (`verify`,
`replay`).

`preflight` finds in seconds what would stop or slow down the trainings of a family. `doctor` times short trainings (`timing`),
one per setting that it changes, and names the limit with the measured gain of each change (`bottleneck`).
`verification` computes parts of a finished training in another way (`checks/`), `reproduction` its first steps once more
(`replay`), and `verify_command` prints what they found.
"""
