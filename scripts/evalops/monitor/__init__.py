"""`--monitor` and `ies batch monitor-job`: a run on AWS Batch with its results as they come, until it ends.

Above both of the packages that it shows together: `batch` knows the jobs, `logs` reads what they write.
"""
