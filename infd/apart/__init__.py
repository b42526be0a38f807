"""Work that may end its process, done in another one.

`Worker` is the daemon's end: it starts the process when there is work, ends it
at a task's limit, and starts another for the next. `serve` is what runs in it.
Neither knows what the tasks are: see `text/apart.py` and `text/worker.py`.
"""
