"""What the black-box tests stand on: a real daemon, real VMs, and a watch over what they leave.

Nothing here knows how vmfork works inside. It is driven as users drive it: through its command line,
its REST API (by the Python SDK) and signals.
"""
