"""Models of the config and of results: loading, adapter stacks, estimated memory.

`load_model.py` loads the base that a config names, and `adapter_stack.py` the model of a result. What a model computes on
packed rows is in `engine/model/`.
"""
