"""Worker processes of a training: started, watched, retried after running out of memory, requeued."""
