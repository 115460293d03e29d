"""The end of a snapshot: a training ends after a share of its steps, with a checkpoint from which the whole run resumes."""

import math

from transformers import TrainerCallback


class EndOfSnapshot(TrainerCallback):
    """Ends a training, with a checkpoint, after this share of its optimizer steps, rounded up."""

    def __init__(self, until: float):
        self.until = until

    def on_train_begin(self, args, state, control, **_):
        """End at once if the checkpoint that is resumed from is that of the end."""
        control.should_training_stop |= self._ended(state)

    def on_step_end(self, args, state, control, **_):
        if self._ended(state):
            control.should_save = control.should_training_stop = True

    def _ended(self, state) -> bool:
        return state.global_step >= math.ceil(state.max_steps * self.until)
