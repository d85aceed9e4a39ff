"""`make demo`: a real daemon and real engine processes, shown to give prompts back.

    phases.py          what is shown, in order, and what each phase must prove
    engine.py          one fresh engine process for each phase, asked through a pipe
    engine_process.py  what runs inside that process: vLLM with our connector
    model.py           a tiny model, made on the spot, so that nothing is downloaded
    report.py          the table and the JSON document

Nothing here imports torch or vLLM at import time, and nothing of the package imports this folder.
"""
