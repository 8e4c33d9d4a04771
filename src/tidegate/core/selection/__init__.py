"""What of the recorded traffic trains: pure steps that each return what stays and what went, and why."""
