"""The configuration: its keys, where each value comes from, what may change while serving."""
