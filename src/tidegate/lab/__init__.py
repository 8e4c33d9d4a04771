"""The smallest places where learning and its ways to fail can be watched, in seconds and without a model.

:mod:`~tidegate.lab.bandit` is one whole policy update on four arms; :mod:`~tidegate.lab.collapse` trains a small policy
on its own successes with and without full curation. Neither touches the traffic, the stores or the gate's log.
"""
