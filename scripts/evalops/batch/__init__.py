"""AWS Batch: `ies run aws` and `ies batch`.

`request` submits, `states` says what a job is doing, `follow` and `logstream` look, `record` remembers which jobs a run has,
`terminate` ends them. `evalops.monitor` shows it all. Batch is the engine: there is no scheduler of our own beside it.
"""
