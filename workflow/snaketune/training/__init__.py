"""The stages that train or pass models over rows: results and specs in, the engine, results out; calibration and launch.

The stages `sft`, `dpo` and `reward` launch worker processes (`launch/`), each of which runs `pipeline.py`: `prepared_sft.py`,
`prepared_dpo.py` and `prepared_reward.py` turn spec and inputs into the engine's arguments, the engine trains, `save_model.py`
writes the result.
`reference/` has the log-probabilities of a reference model, `autotune/` the micro-batch size, and `merge` averages weights.
"""
