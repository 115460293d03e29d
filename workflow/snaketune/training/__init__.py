"""The stages that train or pass models over rows: results and specs in, the engine, results out; calibration and launch."""
