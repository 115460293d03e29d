"""The planner: from a checked config to all jobs, by functions over one `Context`; `all_jobs.plan_jobs` is the entry.

A function such as `sft_job(context, name)` plans one job, after those whose results it reads. Each module imports from those
before it:
context, data_jobs, training_jobs, dpo_jobs, trial_jobs, published_jobs, all_jobs.
"""
