"""Who runs in the next step, and who waits: the scheduler and its line.

Decides only, without torch.
"""
