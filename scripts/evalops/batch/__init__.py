"""AWS Batch: `ies run aws` and `ies batch`.

`request` submits, `states` says what a job is doing, `follow` and `logstream` look, `monitor` shows, `record` remembers which jobs a
run has. Batch is the engine: there is no scheduler of our own beside it.
"""
