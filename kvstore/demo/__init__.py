"""`kvstore demo`: a real daemon and real engine processes, shown to give prompts back.

    phases.py          what is shown, in order, and what each phase must prove
    daemon.py          the daemon as a child process: start, kill -9, stop, throw its arena away
    engine.py          one fresh engine process for each phase, and what it reports
    engine_process.py  what runs inside that process: vLLM with our connector
    model.py           a tiny model, made on the spot, so that nothing is downloaded
    report.py          the table and the JSON document

Nothing here imports torch or vLLM at import time, and the daemon never imports this room.
"""
