"""Run tasks that may crash or hang in a separate process.

`Worker`, in the daemon, starts the process with the first task. A process killed
at a task's limit is replaced for the next task. `serve` is the process's loop.
`text/worker.py`, `grammar/trial.py` and `grammar/xgrammar_trial.py` run the tasks.
"""
