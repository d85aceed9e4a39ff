"""`kvstore doctor`: is this machine fit for the cache, is the daemon well, and what is to be done where not?

    Case (what is looked at) ─▶ checks, each alone ─▶ Findings: ok │ note │ warning │ problem, and one line what to do
                                                         ╰─▶ a bundle for somebody who is to help, without secrets

Nothing is changed. The daemon may be up or down, the caller root or not; a check that fails itself is a finding.
"""
