"""The threads that a model computes with on a CPU."""

# The width of a model from which a second thread pays. Between operations threads sleep, to release their cores, and waking one
# takes longer than a small operation. The demo's DPO, of width 128: 5,400 and 6,100 tokens/s with two threads on idle cores,
# and 4,900 and 6,900 with one while other processes ran on both; with two that spin, its SFT makes 900 then.
MIN_WIDTH_FOR_THREADS = 192
