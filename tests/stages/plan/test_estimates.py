"""Estimated sizes of jobs follow from the models that they read, through results of other jobs."""

from snaketune.cluster.estimates import Estimates


def test_a_merge_is_as_large_as_what_it_merges(planned, jobs):
    estimates = Estimates(planned)
    merged, single = (estimates.of(jobs[name]) for name in ("eval/all/merge-soup", "eval/all/sft-chatty"))
    assert merged.mem_mb == single.mem_mb
    assert estimates.of(jobs["merge/soup"]).mem_mb < 10 * single.mem_mb
    assert estimates.disk(jobs["merge/soup"])[0] == estimates.disk(jobs["sft/chatty"])[0]
