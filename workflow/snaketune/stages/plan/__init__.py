"""The planner: from a checked config to all jobs, by functions over one `Context`.

`all_jobs.plan_jobs` is the entry. A function such as `sft_job(context, name)` plans one job, after those whose results it
reads. A module imports from those before it: context, run_settings, weights, data_jobs, preflight_jobs, training_jobs,
dpo_jobs, diagnosis_jobs, eval_jobs, card_jobs, convert_jobs, all_jobs.
"""
