"""The controller's side of a fleet: plan and submit, follow and finish.

`submit` prepares a run, `controller` drives it, `ledger` knows what it means, `stream` keeps it; `lanes` and `workers` are what it
uses. Design, section 7.
"""
