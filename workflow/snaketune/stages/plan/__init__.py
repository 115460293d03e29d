"""The jobs of each kind, planned by functions over one `Context`; `stages.graph.plan_jobs` calls them.

A function such as `sft_job(context, name)` plans one job, after those whose results it reads. Each module imports from those
before it: data_jobs, training_jobs, dpo_jobs, then model_jobs, doctor_jobs, published_jobs and verify_jobs.
"""
