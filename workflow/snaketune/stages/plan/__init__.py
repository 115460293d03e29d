"""The planner: from a checked config to all jobs, by functions over one `Context`.

`jobs.plan_jobs` is the entry. A function such as `sft_job(context, name)` plans one job, after those whose results it reads.
A module imports from those before it: context, runs, weights, data, preflight, trainings, dpo, diagnosis, evaluation,
cards, conversions, jobs.
"""
