"""Run tasks that may crash or hang in a separate process.

`Worker` is the daemon's end: it starts the process with the first task, ends it
at a task's limit, and starts a new process for the next task. `serve` is the process's
loop. Both are independent of the tasks: see `text/apart.py` and `text/worker.py`.
"""
